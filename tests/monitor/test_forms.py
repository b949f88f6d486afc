"""Forms drawn from `Params`: a widget for every field, errors at the field, the card picker."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import QueryDict
from django.test import Client

from gpus.models import Gpu
from jobs import registry
from jobs.models import Artifact, Job, JobInput, Status
from monitor.forms import KindForm
from tests.conftest import make_card

KINDS = registry.all_kinds()


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def form_of(user: User, kind: str, **typed: str) -> KindForm:
    data = QueryDict(mutable=True)
    data.update({"name": "", **typed})
    return KindForm(kind, user, data, "http://here/")


# The registry -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.needs_gpu != "never"])
def test_every_kind_that_may_need_a_card_lets_people_choose_it(
    name: str, alice: User, three_cards: list[Gpu]
) -> None:
    for path in (f"/new/{name}/", f"/new/{name}/fit/"):
        page = signed_in(alice).get(path).content.decode()
        offered = re.findall(r'<input type="radio" name="gpu" value="([^"]+)"', page)
        assert offered == ["auto", *(gpu.uuid for gpu in three_cards)]


def test_a_kind_without_a_card_says_so(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(KINDS["model_download"]), "needs_gpu", "never")
    page = signed_in(alice).get("/new/model_download/").content.decode()
    assert 'name="gpu"' not in page
    assert "needs no card" in page


@pytest.mark.parametrize("name", KINDS)
def test_every_parameter_has_a_widget(name: str, alice: User, db: None) -> None:
    page = signed_in(alice).get(f"/new/{name}/").content.decode()
    for parameter in KINDS[name].Params().fields:
        assert re.search(rf'name="{parameter}(\.block)?"', page), parameter


def test_kinds_are_offered_by_stage(alice: User) -> None:
    page = signed_in(alice).get("/new/").content.decode()
    places = [page.index(f"/new/{name}/") for name in KINDS]
    assert places == sorted(places)


def test_a_corpus_is_chosen_by_name_or_typed_as_a_path(alice: User, bob: User) -> None:
    mine, theirs = (
        Artifact.objects.create(type="corpus", name="words", owner=owner, manifest={})
        for owner in (alice, bob)
    )
    page = signed_in(alice).get("/new/activation_extraction/").content.decode()
    offered = re.search(r'<datalist id="f-corpus-known">(.*?)</datalist>', page)
    assert offered
    assert re.findall(r'value="([^"]+)"', offered[1])[0] == "english"
    assert set(re.findall(r'value="([^"]+)"', offered[1])) == {"english", "words", "bob/words"}
    for artifact, name in ((mine, "words"), (theirs, "bob/words")):  # the artifact page's link carries its id
        page = signed_in(alice).get(f"/new/activation_extraction/?corpus={artifact.pk}").content.decode()
        assert f'name="corpus" value="{name}"' in page


# What is typed ------------------------------------------------------------------------------------------
def test_numbers_as_people_write_them(alice: User) -> None:
    typed = {"activations": "a", "d_sae": "16 384", "k": "32", "lr": "3e-4", "tokens": "1e6"}
    data = form_of(alice, "sae_training", **typed).data()
    assert (data["d_sae"], data["k"], data["tokens"]) == (16384, 32, 1_000_000)
    assert data["lr"] == "3e-4"


def test_what_is_left_empty_is_left_to_the_default_or_to_null(alice: User) -> None:
    data = form_of(alice, "sae_training", activations="a", d_sae="", tokens="", aux_k="").data()
    assert "d_sae" not in data
    assert "tokens" not in data
    assert data["aux_k"] is None


def test_sites_are_rows(alice: User) -> None:
    typed = QueryDict("name=&sites.block=4&sites.site=resid_post&sites.block=&sites.site=resid_post&model=m")
    data = KindForm("activation_extraction", alice, typed, "/").data()
    assert data["sites"] == [{"block": "4", "site": "resid_post"}]


def test_errors_stand_at_the_field_and_what_was_typed_stays(alice: User, three_cards: list[Gpu]) -> None:
    typed = {"name": "mine", "steps": "-5", "seconds_per_step": "soon", "gpu": three_cards[1].uuid}
    answer = signed_in(alice).post("/new/rehearsal/", typed)
    page = answer.content.decode()
    assert answer.status_code == 400
    assert not Job.objects.exists()
    field = page[page.index('id="f-steps"') :]
    assert 'value="-5"' in field[:200]
    assert 'aria-invalid="true"' in field[:200]
    assert "greater than or equal to 0" in field[:600]
    assert "0 to 100" in field[:700]
    assert 'value="soon"' in page
    assert 'value="mine"' in page
    assert re.search(rf'value="{three_cards[1].uuid}" checked', page)


def test_a_field_with_an_error_is_not_hidden_under_more(alice: User, three_cards: list[Gpu]) -> None:
    page = signed_in(alice).post("/new/rehearsal/", {"name": "", "children": "9"}).content.decode()
    assert page.index('id="f-children"') < page.index("<summary>More</summary>")


def test_what_is_not_the_default_is_not_hidden_under_more(alice: User, three_cards: list[Gpu]) -> None:
    client = signed_in(alice)
    assert "<details><summary>More</summary>" in client.get("/new/sae_training/").content.decode()
    typed = {"name": "", "template_name": "mine", "batch_size": "512"}
    kept = client.post("/new/sae_training/template/", typed).content.decode()
    assert "<details open><summary>More</summary>" in kept


def test_a_good_form_queues_the_job_on_the_named_card(alice: User, three_cards: list[Gpu]) -> None:
    typed = {"name": "mine", "steps": "7", "on_card": "true", "gpu": three_cards[1].uuid}
    answer = signed_in(alice).post("/new/rehearsal/", typed)
    job = Job.objects.get()
    assert answer.url == f"/jobs/{job.pk}/"
    assert (job.name, job.params["steps"], job.gpu_request) == ("mine", 7, three_cards[1].uuid)


def test_an_unknown_card_is_refused_at_the_picker(alice: User, three_cards: list[Gpu]) -> None:
    typed = {"name": "", "on_card": "true", "gpu": "GPU-ffffffff-0000-0000-0000-000000000000"}
    answer = signed_in(alice).post("/new/rehearsal/", typed)
    page = answer.content.decode()
    assert answer.status_code == 400
    assert "No card has this UUID." in page[page.index('id="place"') :]
    assert not Job.objects.exists()


def test_run_again_begins_with_the_old_parameters(alice: User, bob: User, three_cards: list[Gpu]) -> None:
    old = Job.objects.create(kind="rehearsal", owner=alice, params={"steps": 77, "deaf": True})
    assert 'value="77"' in signed_in(alice).get(f"/new/rehearsal/?again={old.pk}").content.decode()
    assert 'value="77"' not in signed_in(bob).get(f"/new/rehearsal/?again={old.pk}").content.decode()
    assert signed_in(alice).get("/new/rehearsal/?again=nonsense").status_code == 200


def test_run_again_keeps_inputs_card_and_name_and_says_what_was_changed(
    alice: User, three_cards: list[Gpu]
) -> None:
    made = Artifact.objects.create(type="capture", name="made", owner=alice)
    old = Job.objects.create(
        kind="rehearsal",
        name="old",
        owner=alice,
        params={"steps": 77, "source": "job:1"},
        gpu_request=three_cards[1].uuid,
    )
    JobInput.objects.create(job=old, parameter="source", artifact=made)
    page = signed_in(alice).get(f"/new/rehearsal/?again={old.pk}").content.decode()
    assert f'<option value="{made.pk}" selected>' in page
    assert 'name="name" value="old"' in page
    assert re.search(rf'value="{three_cards[1].uuid}" checked', page)
    assert "changed" not in re.findall(r'class="field ?(\w*)"', page)
    typed = {"name": "old", "steps": "-78", "source": str(made.pk), "on_card": "true", "again": str(old.pk)}
    page = signed_in(alice).post("/new/rehearsal/", typed).content.decode()
    assert re.search(r'class="field changed" data-was="77">', page)
    assert '<input type="hidden" name="again"' in page


def test_a_card_that_is_gone_is_not_swapped_in_silence(alice: User, three_cards: list[Gpu]) -> None:
    old = Job.objects.create(kind="rehearsal", owner=alice, params={}, gpu_request="GPU-gone")
    page = signed_in(alice).get(f"/new/rehearsal/?again={old.pk}").content.decode()
    assert "Its card is not here any more; auto is chosen." in page


# Several values -----------------------------------------------------------------------------------------
def test_several_values_are_read_as_a_sweep(alice: User) -> None:
    typed = {
        "activations": "a",
        "d_sae": "16 384; 8 192",
        "k": "16,32 , 64",
        "lr": "3e-4",
        "architecture": "topk",
    }
    data = form_of(alice, "sae_training", **typed).data()
    assert (data["d_sae"], data["k"], data["lr"]) == ([16384, 8192], [16, 32, 64], "3e-4")
    assert data["architecture"] == "topk"


def test_a_field_that_cannot_be_swept_takes_commas_between_digits(alice: User) -> None:
    assert form_of(alice, "sae_training", ce_tokens="4,096").data()["ce_tokens"] == 4096


def test_choices_to_try_are_ticked(alice: User, three_cards: list[Gpu]) -> None:
    page = signed_in(alice).get("/new/activation_extraction/").content.decode()
    assert re.findall(r'type="checkbox" name="dtype" value="(\w+)" checked', page) == ["bfloat16"]
    for ticked, read in (("float16&dtype=float32", ["float16", "float32"]), ("float16", "float16")):
        typed = QueryDict(f"name=&model=m&dtype={ticked}")
        assert KindForm("activation_extraction", alice, typed, "/").data()["dtype"] == read


def test_sites_to_try_are_rows(alice: User) -> None:
    typed = QueryDict("name=&site.block=4&site.site=resid_post&site.block=5&site.site=resid_post")
    assert len(KindForm("sae_training", alice, typed, "/").data()["site"]) == 2
    one = QueryDict("name=&site.block=4&site.site=resid_post&site.block=&site.site=resid_post")
    assert KindForm("sae_training", alice, one, "/").data()["site"] == {"block": "4", "site": "resid_post"}


def test_a_form_says_how_many_jobs_it_makes_and_judges_the_largest(
    alice: User, three_cards: list[Gpu]
) -> None:
    typed = {"name": "", "steps": "1, 2, 3", "estimate_mib": "10, 20480", "on_card": "true"}
    page = signed_in(alice).post("/new/rehearsal/fit/", typed).content.decode()
    assert "<b>6 jobs</b>" in page
    assert "Queue 6 jobs" in page
    assert "steps 1, estimate_mib 20480" in page
    assert "buffers 20.0 GiB" in page
    assert "then Rehearsal" not in page


def test_a_form_with_several_values_queues_a_group(alice: User, three_cards: list[Gpu]) -> None:
    answer = signed_in(alice).post("/new/rehearsal/", {"name": "pair", "steps": "1, 2", "on_card": "true"})
    jobs = list(Job.objects.order_by("queued_at"))
    assert answer.url == f"/groups/{jobs[0].group_id}/"
    assert [job.name for job in jobs] == ["pair · steps 1", "pair · steps 2"]


def test_a_bad_value_among_several_stands_at_its_field(alice: User, three_cards: list[Gpu]) -> None:
    page = signed_in(alice).post("/new/rehearsal/", {"name": "", "steps": "1, -2"}).content.decode()
    field = page[page.index('id="f-steps"') :]
    assert 'value="1, -2"' in field[:200]
    assert "With steps -2:" in field[:700]
    assert not Job.objects.exists()


# Inputs -------------------------------------------------------------------------------------------------
def options(page: str, name: str) -> list[str]:
    select = re.search(rf'<select id="f-{name}".*?</select>', page, re.DOTALL)[0]
    return re.findall(r'<option value="([^"]*)"', select)


def test_inputs_offer_artifacts_and_the_jobs_that_will_make_them(alice: User, bob: User) -> None:
    mine = Artifact.objects.create(type="activations", name="mine", owner=alice)
    his = Artifact.objects.create(type="activations", name="his", owner=bob)
    shared = Artifact.objects.create(type="activations", name="shared", owner=bob, shared=True)
    other = Artifact.objects.create(type="model", name="a model", owner=alice)
    coming = Job.objects.create(kind="activation_extraction", owner=alice, params={})
    over = Job.objects.create(kind="activation_extraction", owner=alice, params={}, status=Status.FAILED)
    offered = options(signed_in(alice).get("/new/sae_training/").content.decode(), "activations")
    assert {str(mine.pk), str(shared.pk), f"job:{coming.pk}"} <= set(offered)
    assert not {str(his.pk), str(other.pk), f"job:{over.pk}"} & set(offered)


def test_a_link_from_a_finished_job_names_its_result(alice: User) -> None:
    job = Job.objects.create(
        kind="activation_extraction", name="layer 4", owner=alice, status=Status.SUCCEEDED
    )
    page = signed_in(alice).get(f"/new/sae_training/?activations=job:{job.pk}").content.decode()
    assert f'<option value="job:{job.pk}" selected>the result of layer 4' in page


# Where --------------------------------------------------------------------------------------------------
def picker(page: str) -> dict[str, str]:
    return dict(re.findall(r'name="gpu" value="([^"]+)"(.*?)</label>', page, re.DOTALL))


def test_a_card_that_can_never_hold_the_job_is_disabled_with_the_reason(
    alice: User, three_cards: list[Gpu]
) -> None:
    big = make_card(three_cards[0].host, 3, 80, 80)
    typed = {"name": "", "on_card": "true", "estimate_mib": str(40 * 1024), "gpu": "auto"}
    offered = picker(signed_in(alice).post("/new/rehearsal/fit/", typed).content.decode())
    assert "disabled" in offered[three_cards[0].uuid]
    assert "this card can give" in offered[three_cards[0].uuid]
    assert "disabled" not in offered[big.uuid]
    assert ">now<" in offered[big.uuid]
    assert f"card {big.index} now" in offered["auto"]


def test_a_chosen_card_stays_chosen_even_where_the_job_cannot_go(alice: User, three_cards: list[Gpu]) -> None:
    """A disabled radio is not sent, and "auto" in its place would be a swap."""
    typed = {"name": "", "on_card": "true", "estimate_mib": str(40 * 1024), "gpu": three_cards[0].uuid}
    offered = picker(signed_in(alice).post("/new/rehearsal/fit/", typed).content.decode())
    assert " checked" in offered[three_cards[0].uuid]
    assert "disabled" not in offered[three_cards[0].uuid]
    answer = signed_in(alice).post("/new/rehearsal/", typed)
    assert answer.status_code == 400
    assert not Job.objects.exists()


def test_a_form_that_is_half_filled_shows_the_cards(alice: User, three_cards: list[Gpu]) -> None:
    page = signed_in(alice).post("/new/sae_training/fit/", {"name": "", "d_sae": "many"}).content.decode()
    assert "known once the fields are filled in" in page
    assert page.count('name="gpu"') == 4


def test_parameters_that_need_no_card_say_so(alice: User, three_cards: list[Gpu]) -> None:
    page = signed_in(alice).post("/new/rehearsal/fit/", {"name": ""}).content.decode()
    assert "With these parameters it needs no card." in page


def test_a_stage_whose_memory_nobody_knows_yet_says_so(alice: User, three_cards: list[Gpu]) -> None:
    """What is to be quantized is not here; the disk and the time of its fetch are known."""
    typed = {"name": "", "source": "demo", "quantization": "nf4"}
    page = signed_in(alice).post("/new/model_download/fit/", typed).content.decode()
    assert "memory not known yet · <b>" in page
    assert page.count('name="gpu"') == 4


def test_copy_as_curl_is_the_same_request(alice: User, three_cards: list[Gpu]) -> None:
    typed = {"name": "it's mine", "steps": "7", "on_card": "true", "gpu": three_cards[1].uuid}
    page = signed_in(alice).post("/new/rehearsal/fit/", typed).content.decode()
    command = html.unescape(re.search(r'<pre id="curl">(.*?)</pre>', page, re.DOTALL)[1])
    words = shlex.split(command.replace("\\\n", " "))
    body: dict[str, Any] = json.loads(words[-1])
    assert words[:4] == ["curl", "-X", "POST", "http://testserver/api/v1/jobs/rehearsal/"]
    assert (body["steps"], body["gpu"], body["name"]) == (7, three_cards[1].uuid, "it's mine")
    assert body["on_card"] is True


# What a corpus needs ------------------------------------------------------------------------------------
def test_a_form_says_which_package_a_table_needs(
    alice: User, three_cards: list[Gpu], tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs.interp import extras

    monkeypatch.setattr(extras, "find_spec", lambda _name: None)
    settings.MISTUDIO_IMPORT_ROOTS = [tmp_path]
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    manifest = {"n_layers": 2, "d_model": 8, "d_vocab": 9, "parameters": 99, "dtype": "float32"}
    model = Artifact.objects.create(type="model", name="tiny", owner=alice, manifest=manifest)
    typed = {"name": "", "model": str(model.pk), "corpus": str(tmp_path / "a.parquet"), "sites.block": "0"}
    typed |= {"sites.site": "mlp_in"}
    assert signed_in(alice).post("/new/activation_extraction/fit/", typed).status_code == 200
    answer = signed_in(alice).post("/new/activation_extraction/", typed)
    assert (answer.status_code, "need pyarrow" in answer.content.decode()) == (400, True)
    assert not Job.objects.exists()


def test_several_saes_are_written_as_json_and_come_back_as_they_were(alice: User) -> None:
    """A list of things with fields of their own has no rows in the form."""
    data = form_of(alice, "sae_training", variants='[{"k": 8}, {"k": 16}]').data()
    assert data["variants"] == [{"k": 8}, {"k": 16}]
    typed = form_of(alice, "sae_training", variants="k 8 and 16")
    assert typed.data()["variants"] == "k 8 and 16"
    job = Job.objects.create(kind="sae_training", owner=alice, params={"variants": [{"k": 8}]})
    page = signed_in(alice).get(f"/new/sae_training/?again={job.pk}").content.decode()
    assert "[{&quot;k&quot;: 8}]" in page
