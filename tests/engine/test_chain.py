"""Queued at once and gone home: chains of real processes, whole, broken and mended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.system import System

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


def test_a_broken_link_holds_the_rest_until_its_retry(system: System) -> None:
    first = system.submit("rehearsal", name="breaks", steps=4, seconds_per_step=0, fail_at=2)["id"]
    second = system.submit("rehearsal", name="takes it", source=f"job:{first}", steps=1)["id"]
    third = system.submit("rehearsal", name="last", after=[second], steps=1)["id"]
    held = system.wait(second, "held")
    assert held["error"].startswith(
        f"Its input source was to come from breaks, which ended failed (job {first})"
    )
    assert "told to fail at step 2" in held["error"]
    assert system.job(third)["status"] == "queued"
    status, again = system.call("POST", f"jobs/{first}/retry", {"params": {"fail_at": -1}})
    assert status == 202
    ended = [system.wait(job) for job in (again["id"], second, third)]
    assert [job["status"] for job in ended] == ["succeeded"] * 3
    assert ended[1]["inputs"][0]["artifact"] == ended[0]["artifacts"][0]["id"]
    assert (
        ended[0]["finished_at"] <= ended[1]["started_at"] <= ended[1]["finished_at"] <= ended[2]["started_at"]
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("lab"), time_scale=0.2) as system:
        yield system


@pytest.mark.slow
def test_a_whole_pipeline_is_done_in_the_morning(lab: System) -> None:
    """A model, its activations, a sweep of SAEs on them and a job after the best: nothing is asked in between."""
    example: dict[str, Any] = {kind["name"]: kind["example"] for kind in lab.get("job-kinds/")}
    model = lab.submit("model_download", **example["model_download"])["id"]
    asked = example["activation_extraction"] | {"model": f"job:{model}"}
    activations = lab.submit("activation_extraction", **asked)["id"]
    sweep = example["sae_training"] | {"activations": f"job:{activations}", "tokens": 20_000, "k": [8, 16]}
    group = lab.submit("sae_training", **sweep)
    after = [job["id"] for job in group["jobs"]]
    report = lab.submit("rehearsal", name="report", after=after, steps=1)["id"]
    assert lab.job(report)["status"] == "queued"
    assert lab.wait(report, timeout=300)["status"] == "succeeded"
    trained = lab.get(f"groups/{group['group_id']}/")
    assert trained["states"] == {"succeeded": 2}
    assert {job["inputs"][0]["job"] for job in trained["jobs"]} == {activations}
    assert [job["result"]["k"] for job in trained["jobs"]] == [8, 16]
    assert all(job["result"]["fvu"] > 0 for job in trained["jobs"])
