"""Figures of results: what plotly itself makes of our dictionaries, and what is left out."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go
import pytest
from django.contrib.auth.models import User
from django.contrib.staticfiles import finders
from django.test import Client

from jobs import paths
from jobs.models import Job, Status
from monitor import figures

HISTOGRAM = {"edges": [-10.0, -7.5, -5.0, -2.5, 0.0], "counts": [3, 0, 4, 5]}


@pytest.fixture
def trained(alice: User) -> Job:
    job = Job.objects.create(kind="sae_training", owner=alice, params={}, status=Status.SUCCEEDED)
    job.result = {"fvu": 0.05, "d_in": 576, "model": {"repository": "a/b"}, "artifact": "sae"}
    job.save()
    out = paths.job_folder(job) / "out"
    out.mkdir(parents=True)
    (out / "firing_histogram.json").write_text(json.dumps(HISTOGRAM))
    return job


def test_a_histogram_is_a_figure_that_plotly_accepts(trained: Job) -> None:
    [figure] = figures.result_figures(trained)
    go.Figure(figure["figure"])
    assert figure["figure"]["data"][0]["x"] == [-3.75, -1.25]
    assert figure["figure"]["data"][0]["y"] == [4, 5]
    assert "3 latents never fire" in figure["figure"]["layout"]["xaxis"]["title"]["text"]
    assert {trace["type"] for trace in figure["figure"]["data"]} == {"bar"}  # no WebGL: our policy forbids it


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"edges": [1], "counts": [1]}', '{"edges": 3}', "{"])
def test_a_file_that_is_no_histogram_is_left_out(text: str, trained: Job) -> None:
    (paths.job_folder(trained) / "out" / "firing_histogram.json").write_text(text)
    assert figures.result_figures(trained) == []


SEVERAL: dict[str, Any] = {"edges": HISTOGRAM["edges"], "series": []}
SEVERAL["series"] = [{"name": "k 8", "counts": [3, 0, 4, 5]}, {"name": "k 16", "counts": [1, 0, 0, 11]}]


def test_several_histograms_are_one_figure_that_plotly_accepts(trained: Job) -> None:
    (paths.job_folder(trained) / "out" / "firing_histogram.json").write_text(json.dumps(SEVERAL))
    [figure] = figures.result_figures(trained)
    go.Figure(figure["figure"])
    traces = figure["figure"]["data"]
    assert [(trace["name"], trace["y"]) for trace in traces] == [
        ("k 8 · 3 never", [4, 5]),
        ("k 16 · 1 never", [0, 11]),
    ]
    assert {trace["type"] for trace in traces} == {"scatter"}


SAES: list[dict[str, Any]] = [
    {"name": "k 8", "artifact": "a", "site": "blocks.1.hook_resid_post", "architecture": "topk", "d_sae": 64}
    | {
        "fvu": 0.1234,
        "l0": 8.0,
        "dead_fraction": 0.25,
        "cosine": 0.97,
        "norm_ratio": 0.91,
        "ce_recovered": 0.98,
    },
    {"name": "wild", "site": "blocks.1.hook_resid_post", "architecture": "topk", "d_sae": 64}
    | {"error": "The loss became NaN or infinite at step 13; lower the learning rate."},
]


def test_several_saes_are_a_table_with_what_became_of_each(alice: User, trained: Job) -> None:
    trained.result = {
        "saes": SAES,
        "ce_clean": 3.2,
        "ce_tokens": 500,
        "saturated": "The penalty is saturated.",
    }
    trained.save()
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    page = client.get(f"/jobs/{trained.pk}/").content.decode()
    for words in ("0.1234", "25 %", "0.91", "NaN or infinite at step 13", "The penalty is saturated."):
        assert words in page
    assert "&#x27;name&#x27;" not in page and "{'name'" not in page  # the list itself is not printed beside


def test_quality_is_shown_large_and_the_rest_below() -> None:
    result: dict[str, Any] = {
        "fvu": 0.05,
        "d_in": 576,
        "model": {"repository": "a/b"},
        "long": list(range(99)),
    }
    assert figures.numbers(result) == [("FVU", 0.05)]
    assert list(figures.other_values(result)) == [
        ("d_in", 576),
        ("model repository", "a/b"),
        ("long", "99 values"),
    ]
    assert figures.numbers({"steps": 3}) == [("steps", 3)]
    assert figures.numbers(None) == []


def test_plotly_is_loaded_only_where_there_is_a_figure(alice: User, trained: Job) -> None:
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    assert "plotly" in client.get(f"/jobs/{trained.pk}/").content.decode()
    other = Job.objects.create(kind="sae_training", owner=alice, params={})
    assert "plotly" not in client.get(f"/jobs/{other.pk}/").content.decode()


def test_plotly_is_served_by_ourselves() -> None:
    """Wants the settings line that offers plotly's own copy as `vendor/plotly/`."""
    assert finders.find("vendor/plotly/plotly.min.js")
