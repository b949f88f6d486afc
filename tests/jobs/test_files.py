"""Files over HTTP: inside their folder only, with Range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import Http404

from jobs import files, logs, paths
from jobs.models import Job
from tests.conftest import client_of
from tests.jobs.test_states import make_job


@pytest.fixture
def job(alice: User) -> Job:
    job = make_job(alice)
    folder = paths.job_folder(job)
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "numbers.txt").write_text("0123456789")
    (folder / "job.log").write_text("".join(f"line {n} é\n" for n in range(1000)))
    return job


HOSTILE = [
    "../secret-key", "..%2f..%2fsecret-key", "/etc/passwd", "out/../../../secret-key", "out/\0", "x" * 5000,
    "out//../..//../secret-key", "…/…/secret-key", "link",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_it_reads_nothing_outside_its_folder(job: Job, name: str) -> None:
    root = paths.job_folder(job)
    if not (root / "link").is_symlink():
        (root / "link").symlink_to(root.parent.parent / "secret-key")
    with pytest.raises(Http404):
        files.inside(root, name)


@pytest.mark.parametrize(
    ("header", "expected"),
    [("bytes=0-3", (0, 3)), ("bytes=4-", (4, 9)), ("bytes=-3", (7, 9)), ("bytes=8-99", (8, 9)),
     ("bytes=10-", None), ("bytes=5-2", None), ("bytes=-", None), ("bytes=-0", None), ("items=1-2", None)],
)  # fmt: skip
def test_it_understands_ranges(header: str, expected: Any) -> None:
    assert files.byte_range(header, 10) == expected


async def test_it_streams_a_part(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(100)))
    assert b"".join([piece async for piece in files.pieces(tmp_path / "f", 10, 20)]) == bytes(range(10, 20))


def test_it_answers_a_range_with_206(job: Job, alice: User) -> None:
    client = client_of(alice)
    whole = client.get(f"/api/v1/jobs/{job.pk}/files/out/numbers.txt")
    assert (whole.status_code, whole["Content-Length"]) == (200, "10")
    assert "attachment" in whole["Content-Disposition"]
    part = client.get(f"/api/v1/jobs/{job.pk}/files/out/numbers.txt", headers={"range": "bytes=2-4"})
    assert (part.status_code, part["Content-Range"]) == (206, "bytes 2-4/10")
    assert (
        client.get(f"/api/v1/jobs/{job.pk}/files/out/numbers.txt", headers={"range": "bytes=90-"}).status_code
        == 416
    )


def test_it_lists_the_files(job: Job, alice: User) -> None:
    listed = client_of(alice).get(f"/api/v1/jobs/{job.pk}/files/").data
    assert {"path": "out/numbers.txt", "size_bytes": 10} in listed


def test_it_reads_the_end_of_a_log_and_goes_on(job: Job) -> None:
    piece = logs.tail(job, 2)
    assert piece.text == "line 998 é\nline 999 é\n"
    assert piece.next_offset == piece.size
    with open(paths.log_file(job), "a") as file:
        file.write("new\n")
    assert logs.read(job, piece.next_offset).text == "new\n"
    assert logs.tail(make_job(job.owner)).text == ""


@pytest.mark.parametrize("query", ["tail=x", "offset=-1", "tail=" + "9" * 20, "offset=1e3", "tail=²"])
def test_it_refuses_offsets_that_are_no_numbers(job: Job, alice: User, query: str) -> None:
    assert client_of(alice).get(f"/api/v1/jobs/{job.pk}/log/?{query}").status_code == 400
