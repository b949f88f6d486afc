"""The pages of artifacts as Django renders them: who sees what, what may be done, what is said."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from jobs import paths
from jobs.models import Artifact, Job, JobInput, Status
from tests.monitor.test_pages import make_job, page_of, text_of

pytestmark = pytest.mark.django_db
MANIFEST = {
    "kind": "sae_training",
    "job": "01a22f21-3715-7fb8-8d8e-58d42bd04f1c",
    "params": {"activations": "acts", "d_sae": 1024, "aux_k": None},
    "libraries": {"torch": "2.13.0"},
    "seconds": 9.877,
    "peak_rss_bytes": 1310330880,
    "architecture": "topk",
    "site": "blocks.4.hook_resid_post",
    "fvu": 0.1493368192128432,
    "model": {"name": "smollm2", "d_model": 576, "weights_sha256": "db23"},
    "sites": [{"block": 4, "site": "resid_post", "tokens": 7843}],
}


@pytest.fixture(autouse=True)
def home(settings: Any, tmp_path: Path) -> Path:
    (tmp_path / ".staging").mkdir()
    settings.MISTUDIO_HOME = tmp_path
    return tmp_path


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def make_artifact(owner: User, type: str = "sae", name: str = "my-sae", **fields: Any) -> Artifact:
    values = {"manifest": MANIFEST, "size_bytes": 3 * 2**20} | fields
    artifact = Artifact.objects.create(owner=owner, type=type, name=name, **values)
    folder = paths.artifact_folder(artifact)
    folder.mkdir(parents=True)
    (folder / "cfg.json").write_text("{}")
    return artifact


@pytest.fixture
def sae(alice: User) -> Artifact:
    return make_artifact(alice, job=make_job(alice, name="trainer", status=Status.SUCCEEDED))


def used(artifact: Artifact, by: User, **fields: Any) -> Job:
    job = make_job(by, **fields)
    JobInput.objects.create(job=job, parameter="sae", artifact=artifact)
    return job


# The list -----------------------------------------------------------------------------------------------
def test_strangers_are_sent_to_the_sign_in(sae: Artifact) -> None:
    for path in ("/artifacts/", f"/artifacts/{sae.pk}/"):
        assert Client().get(path).url.startswith("/signin/")
    for verb in ("change", "delete"):
        assert Client().post(f"/artifacts/{sae.pk}/{verb}/").url.startswith("/signin/")
    assert Client().post("/artifacts/").url.startswith("/signin/")


def test_an_empty_list_says_where_artifacts_come_from(alice: User) -> None:
    text = text_of(page_of(alice, "/artifacts/"))
    assert "No artifact yet. Jobs make them" in text
    assert "0 artifacts, 0 B" in text
    assert "None" not in text
    assert "No artifact is like that." in text_of(page_of(alice, "/artifacts/?q=nothing"))


def test_the_list_says_what_made_it_and_who_uses_it(alice: User, sae: Artifact) -> None:
    for name in ("one", "two"):
        used(sae, alice, name=name)
    html = page_of(alice, "/artifacts/")
    assert f'href="/jobs/{sae.job_id}/"' in html
    text = text_of(html)
    assert "my-sae sae alice trainer 2 jobs 3.0 MiB" in text
    assert re.search(r"1 artifact, 3\.0 MiB · [\d.]+ [GT]iB free on the data disk", text)


def test_others_see_what_is_shared_and_what_is_for_all(alice: User, bob: User, staff: User) -> None:
    make_artifact(alice, name="secret-sae")
    make_artifact(alice, name="given-sae", shared=True)
    make_artifact(alice, "corpus", "words")
    assert "secret-sae" in page_of(staff, "/artifacts/")
    text = text_of(page_of(bob, "/artifacts/"))
    assert "secret-sae" not in text
    assert "given-sae" in text
    assert "words" in text
    assert "2 artifacts, 6.0 MiB" in text


def test_filters_and_search(alice: User, bob: User) -> None:
    make_artifact(alice, "sae", "alpha")
    make_artifact(alice, "features", "beta")
    make_artifact(bob, "model", "gamma")
    for query, expected in (
        ("type=sae", {"alpha"}),
        ("owner=alice", {"alpha", "beta"}),
        ("q=AM", {"gamma"}),
        ("owner=bob&type=sae", set()),
        ("q=%00alpha&from=-1", {"alpha"}),
    ):
        html = page_of(alice, f"/artifacts/?{query}")
        assert {name for name in ("alpha", "beta", "gamma") if f">{name}</a>" in html} == expected, query


def test_more_than_a_page_is_loaded_on_request(alice: User) -> None:
    Artifact.objects.bulk_create(
        Artifact(type="sae", owner=alice, name=f"sae-{n}", manifest={}) for n in range(53)
    )
    client = signed_in(alice)
    newest = make_artifact(alice, name="sae-newest")
    first = client.get("/artifacts/?q=sae-", headers={"hx-request": "true"}).content.decode()
    assert first.count('<td class="name">') == 50
    assert "<html" not in first
    assert first.index(f"/artifacts/{newest.pk}/") == first.index("/artifacts/")
    more = unescape(re.search(r'hx-get="([^"]+)"', first)[1])
    rest = client.get(more, headers={"hx-request": "true"}).content.decode()
    assert rest.count('<td class="name">') == 4
    assert "Load more" not in rest


def test_names_are_escaped(alice: User) -> None:
    made = make_artifact(alice, name="<img src=x>", manifest={"site": "<b>bold</b>", "files": {"<i>": {}}})
    for path in ("/artifacts/", f"/artifacts/{made.pk}/"):
        html = page_of(alice, path)
        assert "<img" not in html
        assert "<b>bold" not in html


# One artifact -------------------------------------------------------------------------------------------
def test_its_manifest_is_told_as_facts(alice: User, sae: Artifact) -> None:
    text = text_of(page_of(alice, f"/artifacts/{sae.pk}/"))
    for fact in (
        "architecture topk",
        "FVU 0.1493",
        "model d_model 576",
        "model weights sha256 db23",
        "sites block 4, site resid_post, tokens 7",
        "took 10 s",
        "peak rss 1.2 GiB",
        "params activations acts",
        "params aux k –",
        "libraries torch 2.13.0",
    ):
        assert fact in text, fact
    assert "None" not in text
    assert sae.manifest["job"] not in text


def test_its_files_can_be_fetched(alice: User, sae: Artifact) -> None:
    html = page_of(alice, f"/artifacts/{sae.pk}/")
    address = re.search(r'href="([^"]+cfg\.json)"', html)[1]
    answer = signed_in(alice).get(address)
    assert answer.status_code == 200
    assert "attachment" in answer["Content-Disposition"]


def test_an_sae_says_how_saelens_opens_it(alice: User, sae: Artifact) -> None:
    opens = f'SAE.load_from_disk("{paths.artifact_folder(sae)}")'
    assert opens in page_of(alice, f"/artifacts/{sae.pk}/")
    other = make_artifact(alice, "features", "f")
    assert "load_from_disk" not in page_of(alice, f"/artifacts/{other.pk}/")


def test_what_uses_it_without_what_others_do(alice: User, bob: User, staff: User, sae: Artifact) -> None:
    Artifact.objects.update(shared=True)
    used(sae, alice, name="hers")
    used(sae, bob, name="his", status=Status.FAILED)
    hers = text_of(page_of(alice, f"/artifacts/{sae.pk}/"))
    assert "hers as SAE queued" in hers
    assert "1 job of others" in hers
    assert "his as" not in hers
    assert "his as SAE failed" in text_of(page_of(staff, f"/artifacts/{sae.pk}/"))


def test_it_says_what_it_is_good_for(alice: User) -> None:
    model = make_artifact(alice, "model", "m", manifest={})
    assert f"/new/activation_extraction/?model={model.pk}" in page_of(alice, f"/artifacts/{model.pk}/")


def test_without_job_manifest_or_files_it_still_has_a_page(alice: User) -> None:
    bare = Artifact.objects.create(owner=alice, type="sae", name="bare")
    text = text_of(page_of(alice, f"/artifacts/{bare.pk}/"))
    assert "a job that is not here any more" in text
    assert "Its files are not on this disk." in text


def test_others_cannot_see_or_change_it(bob: User, staff: User, sae: Artifact) -> None:
    page_of(bob, f"/artifacts/{sae.pk}/", 404)
    client = signed_in(bob)
    for shared in (False, True):  # seeing is not owning
        Artifact.objects.update(shared=shared)
        for verb in ("change", "delete"):
            answer = client.post(f"/artifacts/{sae.pk}/{verb}/", {"name": "stolen"})
            assert answer.status_code == 404
    html = page_of(bob, f"/artifacts/{sae.pk}/")
    assert not re.search("Delete|Rename|/change/", html)
    signed_in(staff).post(f"/artifacts/{sae.pk}/change/", {"name": "by-staff"})
    assert Artifact.objects.get().name == "by-staff"


# What its owner may do ----------------------------------------------------------------------------------
def test_the_switch_shares_and_unshares(alice: User, sae: Artifact) -> None:
    client = signed_in(alice)
    for shared in (True, False):
        html = client.get(f"/artifacts/{sae.pk}/").content.decode()
        value = re.search(r'name="shared" value="(\w+)"', html)[1]
        client.post(f"/artifacts/{sae.pk}/change/", {"shared": value})
        sae.refresh_from_db()
        assert (sae.shared, sae.name) == (shared, "my-sae")


def test_a_corpus_has_no_switch(alice: User) -> None:
    html = page_of(alice, f"/artifacts/{make_artifact(alice, 'corpus', 'words').pk}/")
    assert 'role="switch"' not in html
    assert "models and corpora are for all" in html


def test_rename(alice: User, sae: Artifact) -> None:
    make_artifact(alice, name="other")
    client = signed_in(alice)
    client.post(f"/artifacts/{sae.pk}/change/", {"name": "better"})
    sae.refresh_from_db()
    assert (sae.name, sae.shared) == ("better", False)
    for name, said in (("other", "There is a sae of this name already."), ("", "may not be blank")):
        answer = client.post(f"/artifacts/{sae.pk}/change/", {"name": name}, follow=True)
        assert said in answer.content.decode()
    sae.refresh_from_db()
    assert sae.name == "better"


def test_delete_says_what_it_does_and_does_it(alice: User, sae: Artifact) -> None:
    used(sae, alice, name="old", status=Status.SUCCEEDED)
    text = text_of(page_of(alice, f"/artifacts/{sae.pk}/"))
    assert "Its files (3.0 MiB) are removed from the disk at once" in text
    answer = signed_in(alice).post(f"/artifacts/{sae.pk}/delete/", follow=True)
    assert "my-sae is deleted." in answer.content.decode()
    assert not Artifact.objects.exists()
    assert not paths.artifact_folder(sae).exists()


def test_delete_is_refused_while_in_use(alice: User, sae: Artifact) -> None:
    used(sae, alice, name="reader")
    html = page_of(alice, f"/artifacts/{sae.pk}/")
    assert "Not now. Used by reader; wait for it or cancel it." in text_of(html)
    assert f"/artifacts/{sae.pk}/delete/" not in html
    answer = signed_in(alice).post(f"/artifacts/{sae.pk}/delete/", follow=True)
    assert "Used by reader; wait for it or cancel it." in answer.content.decode()
    assert paths.artifact_folder(sae).exists()
    assert Artifact.objects.exists()


# Upload -------------------------------------------------------------------------------------------------
def upload(client: Client, text: str = "Words.", **other: Any) -> Any:
    sent = {"type": "corpus", "name": "words", "file": SimpleUploadedFile("a.txt", text.encode())} | other
    return client.post("/artifacts/", sent)


def test_an_upload_leads_to_its_page(alice: User) -> None:
    client = signed_in(alice)
    answer = upload(client)
    made = Artifact.objects.get()
    assert answer.url == f"/artifacts/{made.pk}/"
    text = text_of(client.get(answer.url).content.decode())
    assert "made by uploaded" in text
    assert "documents 1" in text
    assert "corpus.txt sent as a.txt · SHA-256" in text


def test_a_refused_upload_keeps_what_was_typed_and_says_why(alice: User) -> None:
    client = signed_in(alice)
    for other, said in (
        ({"text": "a\0"}, "The file holds NUL characters"),
        ({"name": "two words"}, "Letters, digits, dot, dash"),
        ({"file": "nothing"}, "not a file"),
    ):
        answer = upload(client, **other)
        assert answer.status_code == 400
        html = answer.content.decode()
        assert "<details" in html
        assert re.search(rf'<span class="error">[^<]*{re.escape(said)}', html)
        assert f'name="name" value="{other.get("name", "words")}"' in html
        assert "open><summary>Upload" in html
    assert not Artifact.objects.exists()


def test_an_upload_that_is_too_large_says_the_limit(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.uploads.LIMIT_BYTES", 3)
    answer = upload(signed_in(alice))
    assert answer.status_code == 413
    assert "The upload is larger than" in answer.content.decode()


def test_an_upload_wants_the_csrf_token_of_the_page(alice: User) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    assert upload(client).status_code == 403


def test_no_inline_script_on_these_pages(alice: User, sae: Artifact) -> None:
    for path in ("/artifacts/", f"/artifacts/{sae.pk}/"):
        html = page_of(alice, path)
        assert all('src="' in tag for tag in re.findall(r"<script\b[^>]*>", html))
        assert not re.search(r"<[^>]+\son[a-z]+\s*=", html)


def test_a_manifest_of_odd_values_is_no_fault(alice: User) -> None:
    odd = {
        "bytes": "many",
        "seconds": [1, 2],
        "n": [],
        "x": {},
        "y": [[1], {"a": None}],
        "z": None,
        "ok": True,
    }
    made = make_artifact(alice, manifest=json.loads(json.dumps(odd)))
    assert "None" not in text_of(page_of(alice, f"/artifacts/{made.pk}/"))
