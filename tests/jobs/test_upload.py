"""Uploads: what is good becomes an artifact; what is not leaves no row and no file."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import urllib.request
import uuid
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import IntegrityError
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from rest_framework.response import Response
from rest_framework.test import APIClient
from safetensors.numpy import save

from gpus.models import Gpu
from jobs import paths, shelf, uploads
from jobs.models import Artifact, Job, JobInput, Status
from tests.conftest import client_of
from tests.monitor.conftest import token_for
from tests.system import System

pytestmark = pytest.mark.django_db
API = "/api/v1/artifacts/"
TEXT = "First paragraph,\nstill the first.\n\n \nThe second: é.\n"
D_IN, D_SAE = 3, 5


@pytest.fixture(autouse=True)
def home(settings: Any, tmp_path: Path) -> Path:
    (tmp_path / ".staging").mkdir()
    settings.MISTUDIO_HOME = tmp_path
    return tmp_path


def files_below(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def part(name: str, content: bytes | str) -> SimpleUploadedFile:
    return SimpleUploadedFile(name, content.encode() if isinstance(content, str) else content)


def weights(**other: Any) -> bytes:
    shapes = {"W_enc": (D_IN, D_SAE), "b_enc": (D_SAE,), "W_dec": (D_SAE, D_IN), "b_dec": (D_IN,)} | other
    return save({name: np.zeros(shape, "f4") for name, shape in shapes.items() if shape is not None})


def config(**other: Any) -> str:
    metadata = {"hook_name": "blocks.4.hook_resid_post", "model_name": "gpt2"}
    return json.dumps(
        {"architecture": "topk", "d_in": D_IN, "d_sae": D_SAE, "k": 2, "metadata": metadata} | other
    )


def sae_files(**other: Any) -> list[Any]:
    contents = {"cfg.json": config(), "sae_weights.safetensors": weights()} | other
    return [(name, content) for name, content in contents.items() if content is not None]


def post(user: User, type: str = "corpus", name: str = "mine", file: Any = (("a.txt", TEXT),)) -> Response:
    sent = file if isinstance(file, str) else [part(*named) for named in file]
    return client_of(user).post(API, {"type": type, "name": name, "file": sent}, format="multipart")


# What is good -------------------------------------------------------------------------------------------
def test_a_corpus_becomes_an_artifact(alice: User, home: Path) -> None:
    answer = post(alice, file=[("../../etc/My Text.TXT", TEXT)])
    assert answer.status_code == 201
    artifact = Artifact.objects.get()
    folder = f"artifacts/corpus/{artifact.pk}"
    assert files_below(home) == [f"{folder}/corpus.txt", f"{folder}/manifest.json"]
    assert (home / folder / "corpus.txt").read_text() == TEXT
    manifest = json.loads((home / folder / "manifest.json").read_text())
    assert manifest == artifact.manifest == answer.data["manifest"]
    assert (manifest["kind"], manifest["documents"], manifest["characters"]) == ("upload", 2, len(TEXT))
    sent = {"sent_as": "My Text.TXT", "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    assert manifest["files"] == {"corpus.txt": sent | {"size_bytes": len(TEXT.encode())}}
    assert (answer.data["owner"], answer.data["job"], answer.data["name"]) == ("alice", None, "mine")
    assert answer.data["size_bytes"] == paths.size_of(home / folder)


def test_documents_are_counted_as_the_extraction_parts_them(alice: User) -> None:
    from jobs.interp import corpora

    text = "\n\n a\r\n\r\nb\n \t\nc\nd\n\n\n\ne"
    artifact = Artifact.objects.get(pk=post(alice, file=[("a.txt", text)]).data["id"])
    corpus = corpora.open_corpus(str(paths.artifact_folder(artifact) / "corpus.txt"))
    assert artifact.manifest["documents"] == len(list(corpus.documents)) == 4


def test_a_corpus_may_be_json_lines_or_rows_of_tokens(alice: User, home: Path) -> None:
    lines = '{"text": "a", "messages": []}\n\n{"text": "b"}\n'
    made = post(alice, name="lines", file=[("Mine.JSONL", lines)]).data["manifest"]
    assert (made["documents"], made["fields"]) == (2, ["messages", "text"])
    assert list(made["files"]) == ["corpus.jsonl"]
    rows = save({"input_ids": np.ones((3, 4), "i4")}, {"tokenizer_sha256": "abc"})
    made = post(alice, name="rows", file=[("rows.safetensors", rows)]).data["manifest"]
    assert (made["documents"], made["tokens"], made["tokenizer_sha256"]) == (3, 12, "abc")
    flat = save({"input_ids": np.ones(3, "f4")})
    assert_refused(post(alice, name="flat", file=[("rows.safetensors", flat)]), "file", home, kept=2)


def test_a_corpus_in_parquet_needs_the_package(
    alice: User, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs.interp import extras

    monkeypatch.setattr(extras, "find_spec", lambda _name: None)
    answer = post(alice, file=[("a.parquet", b"PAR1")])
    assert (answer.status_code, answer.data["code"]) == (400, "missing_extra")
    assert answer.data["hint"] == "python3 scripts/setup.py --tables"
    assert files_below(home) == []


def test_a_corpus_may_be_a_table(alice: User, home: Path) -> None:
    table = pyarrow.table({"text": ["a", "b"], "id": [1, 2]})
    pyarrow.parquet.write_table(table, written := BytesIO())
    made = post(alice, file=[("a.parquet", written.getvalue())]).data["manifest"]
    assert (made["documents"], made["fields"]) == (2, ["text", "id"])
    assert_refused(post(alice, name="b", file=[("a.parquet", b"PAR1")]), "file", home, kept=1)


@pytest.mark.parametrize("sparsity", [False, True])
def test_an_sae_becomes_an_artifact(alice: User, home: Path, sparsity: bool) -> None:
    extra = {"sparsity.safetensors": save({"sparsity": np.zeros(D_SAE, "f4")})} if sparsity else {}
    answer = post(alice, "sae", "gpt2-l4", sae_files(**extra))
    assert answer.status_code == 201, answer.data
    facts = {"architecture": "topk", "d_in": D_IN, "d_sae": D_SAE, "k": 2, "model_name": "gpt2"}
    assert facts.items() <= answer.data["manifest"].items()
    assert answer.data["manifest"]["site"] == "blocks.4.hook_resid_post"
    assert len(files_below(home)) == (4 if sparsity else 3)


def test_an_sae_that_was_uploaded_can_be_loaded(alice: User) -> None:
    from jobs.interp.sae.files import load_sae

    made = Artifact.objects.get(pk=post(alice, "sae", "s", sae_files()).data["id"])
    assert (load_sae(paths.artifact_folder(made)).d_sae, made.job) == (D_SAE, None)


def test_jobs_take_it_by_its_name(alice: User) -> None:
    from jobs.artifacts import resolve

    made = post(alice, "sae", "s", sae_files()).data["id"]
    found = resolve("s", ("sae",), alice).artifact
    assert found is not None
    assert str(found.pk) == made


def test_the_same_name_for_another_type_or_person_is_free(alice: User, bob: User) -> None:
    assert [post(alice).status_code, post(bob).status_code] == [201, 201]
    assert post(alice, "sae", file=sae_files()).status_code == 201


# What is refused ----------------------------------------------------------------------------------------
class Harm:
    """A pickle that would say so if anybody opened it."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("/tmp/mistudio-was-harmed",))


PICKLE = pickle.dumps(Harm())
WHOLE = weights()
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no type": ("type", {"type": ""}),
    "a type of jobs only": ("type", {"type": "model"}),
    "no name": ("name", {"name": ""}),
    "a path for a name": ("name", {"name": "../mine"}),
    "an owner in the name": ("name", {"name": "bob/mine"}),
    "a space in the name": ("name", {"name": "my corpus"}),
    "a hidden name": ("name", {"name": ".mine"}),
    "a long name": ("name", {"name": "x" * 151}),
    "no file": ("file", {"file": []}),
    "a word for a file": ("file.0", {"file": "words"}),
    "an empty file": ("file.0", {"file": [("a.txt", "")]}),
    "two corpora": ("file", {"file": [("a.txt", "a"), ("b.txt", "b")]}),
    "a zip": ("file", {"file": [("a.zip", b"PK\x03\x04")]}),
    "a pickle": ("file", {"file": [("a.pkl", PICKLE)]}),
    "a pickle called text": ("file", {"file": [("a.txt", PICKLE)]}),
    "latin-1": ("file", {"file": [("a.txt", "café".encode("latin-1"))]}),
    "half a character": ("file", {"file": [("a.txt", "é".encode()[:1])]}),
    "NUL in the text": ("file", {"file": [("a.txt", b"a\0b")]}),
    "blanks only": ("file", {"file": [("a.txt", " \n\n\t\n")]}),
    "JSON that is none": ("file", {"file": [("a.jsonl", "{}\n{")]}),
    "a list in JSON Lines": ("file", {"file": [("a.jsonl", "[]\n")]}),
    "no line at all": ("file", {"file": [("a.jsonl", "\n \n")]}),
    "a field named NUL": ("file", {"file": [("a.jsonl", '{"\\u0000": 1}\n')]}),
    "brackets in JSON Lines": ("file", {"file": [("a.jsonl", "[" * 100_000)]}),
    "vectors for tokens": ("file", {"file": [("a.safetensors", weights())]}),
    "a pickle called tokens": ("file", {"file": [("a.safetensors", PICKLE)]}),
}
SAE_REFUSED: dict[str, dict[str, Any]] = {
    "no cfg": {"cfg.json": None},
    "no weights": {"sae_weights.safetensors": None},
    "a file too many": {"notes.md": "hello"},
    "a pickle beside": {"sae.pt": PICKLE},
    "a pickle called safetensors": {"sae_weights.safetensors": PICKLE},
    "weights cut short": {"sae_weights.safetensors": WHOLE[:-4]},
    "weights with a tail": {"sae_weights.safetensors": WHOLE + b"tail"},
    "weights without header": {"sae_weights.safetensors": b"\xff" * 64},
    "no decoder": {"sae_weights.safetensors": weights(W_dec=None)},
    "an encoder turned round": {"sae_weights.safetensors": weights(W_enc=(D_SAE, D_IN))},
    "a short bias": {"sae_weights.safetensors": weights(b_enc=(D_SAE - 1,))},
    "whole numbers for weights": {"sae_weights.safetensors": save({"W_enc": np.zeros((D_IN, D_SAE), "i4")})},
    "sparsity of another width": {"sparsity.safetensors": save({"sparsity": np.zeros(D_SAE + 1, "f4")})},
    "sparsity of another name": {"sparsity.safetensors": save({"density": np.zeros(D_SAE, "f4")})},
    "cfg is a list": {"cfg.json": "[]"},
    "cfg is no JSON": {"cfg.json": "{'d_in': 3}"},
    "cfg is not UTF-8": {"cfg.json": b'{"a": "\xe9"}'},
    "cfg with NaN": {"cfg.json": '{"d_in": NaN}'},
    "cfg with a NUL": {"cfg.json": config(architecture="a\0b")},
    "cfg of brackets": {"cfg.json": "[" * 5000},
    "cfg of a MiB": {"cfg.json": config(note="x" * 2**20)},
    "no d_in": {"cfg.json": config(d_in=None)},
    "d_in is true": {"cfg.json": config(d_in=True)},
    "another d_sae": {"cfg.json": config(d_sae=D_SAE + 1)},
}


def assert_refused(answer: Response, field: str, home: Path, kept: int = 0) -> None:
    assert (answer.status_code, answer.data["code"]) == (400, "invalid"), answer.data
    assert field in answer.data["errors"]
    assert answer.data["errors"][field][0]
    assert len(files_below(home)) == 2 * kept
    assert Artifact.objects.count() == kept


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_corpus_leaves_nothing(case: str, alice: User, home: Path) -> None:
    field, body = REFUSED[case]
    assert_refused(post(alice, **body), field, home)
    assert not Path("/tmp/mistudio-was-harmed").exists()


@pytest.mark.parametrize("case", SAE_REFUSED)
def test_a_bad_sae_leaves_nothing(case: str, alice: User, home: Path) -> None:
    assert_refused(post(alice, "sae", file=sae_files(**SAE_REFUSED[case])), "file", home)
    assert not Path("/tmp/mistudio-was-harmed").exists()


@pytest.mark.parametrize("body", [{}, [], {"type": "corpus", "name": "a", "file": "words"}])
def test_json_is_told_what_is_missing(body: Any, alice: User) -> None:
    answer = client_of(alice).post(API, body, format="json")
    assert (answer.status_code, answer.data["code"]) == (400, "invalid")


def test_a_name_is_used_once(alice: User, home: Path) -> None:
    assert post(alice).status_code == 201
    before = files_below(home)
    answer = post(alice)
    assert (answer.status_code, answer.data["errors"]) == (
        400,
        {"name": ["There is a corpus of this name already."]},
    )
    assert files_below(home) == before


def test_the_same_name_at_once_is_settled_by_the_database(
    alice: User, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(*args: Any, **options: Any) -> None:
        raise IntegrityError

    monkeypatch.setattr(Artifact, "save", second)
    assert_refused(post(alice), "name", home)


def test_a_crash_in_the_middle_leaves_nothing(
    alice: User, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paths, "sync_folder", full)
    with pytest.raises(OSError, match="No space"):
        post(alice)
    assert files_below(home) == []
    assert Artifact.objects.count() == 0


def test_what_is_too_large_is_refused_with_the_limit(
    alice: User, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "LIMIT_BYTES", 10)
    for framing in (uploads.FRAMING_BYTES, 0):  # by the sum of the files; by what the request announces
        monkeypatch.setattr(uploads, "FRAMING_BYTES", framing)
        answer = post(alice)
        assert (answer.status_code, answer.data["code"], answer.data["limit_bytes"]) == (413, "too_large", 10)
    assert files_below(home) == []


def test_a_full_disk_is_said(alice: User, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "disk_reserve_bytes", lambda total: total)
    answer = post(alice)
    assert (answer.status_code, answer.data["code"]) == (503, "disk_full")
    assert files_below(home) == []


def test_the_web_loads_no_torch_for_it(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(WHOLE)
    script = (
        "import sys, pathlib; from jobs import contents; print(contents.shapes(pathlib.Path(sys.argv[1]))); "
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "w.safetensors")]
    subprocess.run(command, check=True, cwd=django_settings.BASE_DIR)


@pytest.mark.engine
def test_the_web_server_holds_a_large_upload_once(system: System) -> None:
    """By itself, Twisted takes twelve times its size to parse a form that nobody reads."""
    megabytes, web = 64, Path(f"/proc/{system.pid('web')}/status")

    def peak() -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", web.read_text())[1]) // 1024

    before = peak()
    assert large_upload(system, ("word " * 200 + "\n\n") * (megabytes * 1024)) == 201
    assert peak() - before < 3 * megabytes


def large_upload(system: System, text: str) -> int:
    fields = {"type": "corpus", "name": f"large-{uuid.uuid4()}", "file": part("large.txt", text)}
    body = encode_multipart(BOUNDARY, fields)
    headers = {"Authorization": f"Token {system.token}", "Content-Type": MULTIPART_CONTENT}
    request = urllib.request.Request(system.url + API, body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status


# Who may ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("scope", "status"), [("submit", 201), ("read", 403), ("control", 403)])
def test_a_token_needs_the_scope_submit(scope: str, status: int, alice: User) -> None:
    client = APIClient(HTTP_AUTHORIZATION=f"Token {token_for(alice, scope)}")
    body = {"type": "corpus", "name": "mine", "file": part("a.txt", TEXT)}
    assert client.post(API, body, format="multipart").status_code == status


def test_an_sae_is_its_owners_and_a_corpus_is_for_all(alice: User, bob: User, staff: User) -> None:
    sae = post(alice, "sae", "s", sae_files()).data["id"]
    corpus = post(alice).data["id"]
    for user, seen in ((bob, {corpus}), (staff, {sae, corpus})):
        assert {row["id"] for row in client_of(user).get(API).data["results"]} == seen
    for method, path in (("get", ""), ("get", "files/"), ("get", "files/cfg.json"), ("delete", "")):
        assert getattr(client_of(bob), method)(f"{API}{sae}/{path}").status_code == 404
    for method in ("patch", "delete"):
        assert getattr(client_of(bob), method)(f"{API}{corpus}/", {}, format="json").status_code == 404
    assert client_of(staff).delete(f"{API}{sae}/").status_code == 204


def test_what_is_in_use_stays(alice: User, three_cards: list[Gpu], home: Path) -> None:
    artifact = Artifact.objects.get(pk=post(alice).data["id"])
    job = Job.objects.create(kind="rehearsal", owner=alice, name="reader", params={})
    JobInput.objects.create(job=job, parameter="corpus", artifact=artifact)
    answer = client_of(alice).delete(f"{API}{artifact.pk}/")
    assert (answer.status_code, answer.data["code"]) == (409, "in_use")
    assert answer.data["detail"] == shelf.in_use(artifact) == "Used by reader; wait for it or cancel it."
    assert len(files_below(home)) == 2
    Job.objects.update(status=Status.CANCELLED)
    assert client_of(alice).delete(f"{API}{artifact.pk}/").status_code == 204
    assert files_below(home) == []


def test_a_new_name_may_not_be_taken(alice: User) -> None:
    first, _ = post(alice, name="one").data["id"], post(alice, name="two")
    answer = client_of(alice).patch(f"{API}{first}/", {"name": "two"}, format="json")
    assert answer.data["errors"] == {"name": ["There is a corpus of this name already."]}
    assert client_of(alice).patch(f"{API}{first}/", {"name": "one"}, format="json").status_code == 200
