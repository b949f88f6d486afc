"""The pages as Django renders them: who sees what, and a face for every odd state."""

from __future__ import annotations

import gzip
import random
import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.staticfiles import finders
from django.test import Client
from django.utils import timezone

from gpus import recorder
from gpus.models import Gpu, Host
from jobs import paths
from jobs.models import Artifact, Attempt, Job, JobEvent, JobMetric, Status
from tests.conftest import make_card

NULLS = {"memory_total_bytes": None, "memory_free_bytes": None, "memory_used_bytes": None}


def page_of(user: User, path: str, status: int = 200) -> str:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    answer = client.get(path)
    assert answer.status_code == status, f"{path}: {answer.status_code}"
    return answer.content.decode()


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def make_job(owner: User, **fields: Any) -> Job:
    return Job.objects.create(**{"kind": "rehearsal", "owner": owner, "params": {"steps": 3}} | fields)


# Who gets in --------------------------------------------------------------------------------------------
PATHS = ["/", "/parts/", "/jobs/", "/jobs/rows/", "/new/", "/new/rehearsal/"]


@pytest.mark.parametrize("path", PATHS)
def test_pages_want_a_login(path: str, db: None) -> None:
    answer = Client().get(path)
    assert answer.status_code == 302
    assert answer.url.startswith("/signin/")


@pytest.mark.parametrize("path", PATHS)
def test_every_page_for_everybody(path: str, alice: User, staff: User, three_cards: list[Gpu]) -> None:
    for user in (alice, staff):
        assert "None" not in text_of(page_of(user, path))


def test_admin_is_offered_to_staff_alone(alice: User, staff: User) -> None:
    assert "/admin/" not in page_of(alice, "/jobs/")
    assert "/admin/" in page_of(staff, "/jobs/")


def test_an_unknown_address_has_a_page(alice: User) -> None:
    assert "Nothing is here" in page_of(alice, "/nothing/", 404)
    assert "Nothing is here" in page_of(alice, "/new/no_such_kind/", 404)


@pytest.mark.parametrize("path", [*PATHS, "job"])
def test_no_inline_script_and_no_inline_handler(path: str, alice: User, three_cards: list[Gpu]) -> None:
    html = page_of(alice, f"/jobs/{make_job(alice).pk}/" if path == "job" else path)
    scripts = re.findall(r"<script\b[^>]*>", html)
    assert all('src="' in tag or 'type="application/json"' in tag for tag in scripts)
    assert not re.search(r"<[^>]+\son[a-z]+\s*=", html)
    assert "javascript:" not in html


# Monitor ------------------------------------------------------------------------------------------------
def test_unknown_readings_are_dashes_never_zero(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, reading={}, memory_total_bytes=None)
    html = page_of(alice, "/")
    shown = dict(re.findall(r'data-field="(\w+)"[^>]*>([^<]*)<', html[html.index("data-card") :]))
    assert shown["utilization_gpu_percent"] == "–"
    assert shown["temperature_celsius"] == "–"
    assert shown["power_draw_watts"] == "–"
    assert shown["memory_used_bytes"] == "–"


@pytest.mark.parametrize(("count", "lines"), [(1, False), (8, False), (9, True), (64, True)])
def test_from_nine_cards_on_rows_are_lines(count: int, lines: bool, alice: User, living_host: Host) -> None:
    for index in range(count):
        make_card(living_host, index, uuid=f"GPU-00000000-0000-0000-0000-{index:012d}")
    html = page_of(alice, "/")
    assert html.count("data-card=") == count
    assert ('class="rows lines"' in html) is lines
    assert f'<b data-field="readable_count">{count}</b>' in html


def test_a_lost_card_says_so_and_shows_no_old_numbers(alice: User, living_host: Host) -> None:
    now = timezone.now()
    make_card(living_host, 0, lost_at=now, last_seen_at=now - timedelta(minutes=9), error="NVML: GPU is lost")
    text = text_of(page_of(alice, "/"))
    assert "lost · 9 min" in text
    assert "Card 0 of alpha was lost 9 min ago." in text
    assert "NVML: GPU is lost. The card returns by itself when it answers again." in text
    assert "24.0 free" not in text


def test_split_cards_instances_and_shared_memory_say_what_they_are(alice: User, living_host: Host) -> None:
    whole = make_card(living_host, 0, total_gib=40, selectable=False, info={"mig_mode": True})
    part = {"mig_mode": True, "mig_parent": whole.uuid, "mig_place": "1/0"}
    make_card(living_host, 1, uuid="MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", total_gib=20, info=part)
    make_card(living_host, 2, info={"unified_memory": True})
    html = page_of(alice, "/")
    text = text_of(html)
    assert "Split into MIG instances: jobs use those." in text
    assert html.count("MIG instance</span>") == 1
    assert html.count("shared with the system</span>") == 1
    assert '<span data-field="gpu_count">2</span>' in html  # the instance is a part of its card


def test_a_silent_agent_is_said_once(alice: User, three_cards: list[Gpu]) -> None:
    Host.objects.update(agent_seen_at=timezone.now() - timedelta(minutes=5))
    text = text_of(page_of(alice, "/"))
    assert text.count("The agent of alpha was last heard 5 min ago.") == 1


def test_no_card_names_the_cause_and_the_repair(alice: User, living_host: Host) -> None:
    living_host.backend_error = "libnvidia-ml.so.1 is missing. Install the driver: apt install nvidia-driver"
    living_host.save()
    text = text_of(page_of(alice, "/"))
    assert "No card of alpha can be read." in text
    assert "apt install nvidia-driver" in text


def test_before_any_agent_the_page_says_how_to_start_one(alice: User) -> None:
    assert "No host is known yet." in text_of(page_of(alice, "/"))


def test_simulated_cards_are_labelled(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, simulated=True)
    assert ">simulated<" in page_of(alice, "/")


def test_names_of_cards_and_jobs_are_escaped(alice: User, living_host: Host) -> None:
    make_card(living_host, 0, name="<img src=x>", note="<b>bold</b>")
    make_job(alice, name="<script>alert(1)</script>")
    for path in ("/", "/jobs/"):
        html = page_of(alice, path)
        assert "<img" not in html
        assert "<b>bold" not in html
        assert "<script>alert" not in html


def test_the_queue_says_why_not_now(alice: User, three_cards: list[Gpu]) -> None:
    make_job(
        alice, name="second", waiting_for={"reason": "lease", "detail": "after first", "eta_seconds": 2280}
    )
    text = text_of(page_of(alice, "/"))
    assert "second" in text
    assert "after first, about 38 min" in text


def part_of(html: str, name: str) -> str:
    """The text of the element with this `data-part`, roughly."""
    return text_of(html[html.index(f'data-part="{name}"') :])[:600]


def test_a_card_in_other_hands_is_not_free(alice: User, three_cards: list[Gpu]) -> None:
    """From a tenth of its memory on; a desktop's share leaves it free."""
    for card, mib in zip(three_cards, (20 * 1024, 2457, 2458), strict=True):
        taken = [{"pid": 1, "name": "python", "user": "root", "memory_used_bytes": mib * 2**20}]
        Gpu.objects.filter(pk=card.pk).update(processes=taken)
    html = page_of(alice, "/")
    assert "Free now 1 1 of 3" in part_of(html, "glance")
    assert text_of(html).count("used by others") == 2
    assert "takes the next job that fits beside the 20.0 GiB of others" in text_of(html)


def test_the_first_line_answers(alice: User, bob: User, three_cards: list[Gpu]) -> None:
    _, second, third = three_cards
    stranger = [{"pid": 1, "name": "Xorg", "user": "root", "memory_used_bytes": 153 * 2**20}]
    readings = [{"temperature_celsius": heat, "power_draw_watts": 100.0} for heat in (50.0, 71.0, 60.0)]
    for card, reading in zip(three_cards, readings, strict=True):
        Gpu.objects.filter(pk=card.pk).update(reading=reading, processes=stranger if card is second else [])
    Gpu.objects.filter(pk=third.pk).update(lost_at=timezone.now(), last_seen_at=timezone.now())
    waits = {"reason": "lease", "detail": "after layer-12", "eta_seconds": 2280}
    for number in range(4):
        make_job(alice, name=f"waiting {number}", waiting_for=waits)
    glance = part_of(page_of(alice, "/"), "glance")
    assert "Free now 0 1 2 of 3" in glance
    assert "Hottest 71 °C card 1" in glance  # 60 °C was the last that the lost card said
    assert "Next to start waiting 0 after layer-12, about 38 min waiting 1" in glance
    assert "and 2 more" in glance
    assert "Not ours Xorg root 153 MiB on 1" in glance
    assert "2 lost" in glance
    assert "after layer-12" not in part_of(page_of(bob, "/"), "glance")  # the detail is its owner's


def test_without_a_broker_the_queues_are_dashes(alice: User, living_host: Host) -> None:
    html = page_of(alice, "/")
    assert "broker silent" in part_of(html, "glance")
    assert "gpu.alpha – –" in part_of(html, "workers")


def test_processes_of_all_cards_largest_first(alice: User, three_cards: list[Gpu]) -> None:
    for card, sizes in zip(three_cards, ([5, None], [900], [70]), strict=True):
        listed = [{"pid": 10 * card.index + n, "memory_used_bytes": of} for n, of in enumerate(sizes)]
        Gpu.objects.filter(pk=card.pk).update(processes=listed, processes_at=timezone.now())
    html = page_of(alice, "/")
    rows = re.findall(r"<tr><td>.*?</tr>", html[html.index('data-part="processes"') :])[:4]
    assert [text_of(row).split()[:2] for row in rows] == [["1", "10"], ["2", "20"], ["0", "0"], ["0", "1"]]


def test_a_removed_card_leaves_the_monitor(alice: User, three_cards: list[Gpu]) -> None:
    Gpu.objects.filter(index=1).update(removed_at=timezone.now())
    assert page_of(alice, "/").count("data-card=") == 2


def reading(dice: random.Random, uuid: str, at: int) -> recorder.Sample:
    values = (
        dice.randrange(1001),
        dice.randrange(80 * 2**30),
        dice.randrange(300, 900),
        dice.randrange(3500),
    )
    return recorder.Sample(uuid, at, values)


def test_the_monitor_fits_in_250_kilobytes(alice: User, living_host: Host) -> None:
    """With eight cards and a window of history in which every step has its band."""
    now, dice = int(1000 * timezone.now().timestamp()), random.Random(0)
    for index in range(8):
        uuid = make_card(living_host, index).uuid
        recorder.write([reading(dice, uuid, at) for at in range(now - 1_800_000, now, 2_000)])
    html = page_of(alice, "/")
    files = re.findall(r'(?:src|href)="/static/([^"]+)"', html)
    assert any("uPlot" in name for name in files)
    fetched = [html, page_of(alice, "/curves/?minutes=30"), page_of(alice, "/parts/")]
    bodies = [text.encode() for text in fetched] + [open(finders.find(name), "rb").read() for name in files]
    weights = [len(gzip.compress(body)) for body in bodies]
    assert weights[1] > 20_000  # the curves are there
    assert sum(weights) <= 250_000, weights


# Jobs ---------------------------------------------------------------------------------------------------
def test_an_empty_list_says_what_to_do_first(alice: User) -> None:
    assert "model download" in text_of(page_of(alice, "/jobs/"))
    assert "No job is like that." in text_of(page_of(alice, "/jobs/?status=failed"))


def test_filters_of_the_list(alice: User, bob: User) -> None:
    make_job(alice, name="hers", status=Status.FAILED)
    make_job(bob, name="his")
    assert "his" in page_of(alice, "/jobs/rows/")
    assert "his" not in page_of(alice, "/jobs/rows/?mine=1")
    assert "hers" not in page_of(alice, "/jobs/rows/?status=queued")
    assert "hers" in page_of(alice, "/jobs/rows/?status=failed&kind=rehearsal")
    assert "hers" not in page_of(alice, "/jobs/rows/?kind=sae_training")


def test_more_than_a_page_is_loaded_on_request(alice: User) -> None:
    for number in range(53):
        make_job(alice, name=f"job {number}")
    first = page_of(alice, "/jobs/rows/")
    assert first.count("<tr id=") == 50
    address = re.search(r'hx-get="([^"]+)"', first)[1]
    rest = page_of(alice, address)
    assert rest.count("<tr id=") == 3
    assert "Load more" not in rest


def test_rows_by_id_and_by_nonsense(alice: User) -> None:
    job = make_job(alice)
    assert page_of(alice, f"/jobs/rows/?ids={job.pk},nonsense").count("<tr id=") == 1
    assert page_of(alice, "/jobs/rows/?from=-1&status=none") is not None


# One job ------------------------------------------------------------------------------------------------
@pytest.fixture
def failed(alice: User, three_cards: list[Gpu]) -> Job:
    job = make_job(
        alice,
        name="broken",
        status=Status.FAILED,
        failure_reason="out_of_memory",
        error="The card had 1.2 GiB free and 3.4 GiB were needed.",
        hint="Try batch_size 8.",
        traceback="Traceback: torch.OutOfMemoryError",
        gpu_uuids=[three_cards[1].uuid],
        gpu_uuid=three_cards[1].uuid,
        attempt=1,
        started_at=timezone.now() - timedelta(seconds=90),
        finished_at=timezone.now(),
    )
    Attempt.objects.create(
        job=job, number=1, host=three_cards[0].host, gpu_uuids=job.gpu_uuids, gpu_names=["Card"]
    )
    return job


def test_a_failed_job_leads_with_its_sentence_and_offers_a_retry(
    alice: User, staff: User, failed: Job
) -> None:
    for user in (alice, staff):
        text = text_of(page_of(user, f"/jobs/{failed.pk}/"))
        assert "The card had 1.2 GiB free and 3.4 GiB were needed. Try batch_size 8." in text
        assert "torch.OutOfMemoryError" in text
        assert "same card: 1 Card 24 GiB" in text
        assert "card 0 · Card 24 GiB" in text


def test_others_see_the_reduced_form(bob: User, failed: Job) -> None:
    html = page_of(bob, f"/jobs/{failed.pk}/")
    assert "broken" in html
    assert "out of memory" in html
    for hidden in ("1.2 GiB", "batch_size 8", "OutOfMemoryError", "Retry", 'id="log"', "steps"):
        assert hidden not in html, hidden


def test_others_can_do_nothing_to_it(bob: User, failed: Job) -> None:
    client = Client()
    client.force_login(bob, backend="django.contrib.auth.backends.ModelBackend")
    for verb in ("cancel", "retry"):
        assert client.post(f"/jobs/{failed.pk}/{verb}/").status_code == 404
    assert client.get(f"/jobs/{failed.pk}/points/").status_code == 404


def test_retry_makes_a_new_job_on_the_card_that_was_chosen(
    alice: User, failed: Job, three_cards: list[Gpu]
) -> None:
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    answer = client.post(f"/jobs/{failed.pk}/retry/", {"gpu": three_cards[2].uuid})
    again = Job.objects.get(retry_of=failed)
    assert answer.url == f"/jobs/{again.pk}/"
    assert again.gpu_request == three_cards[2].uuid
    client.post(f"/jobs/{again.pk}/cancel/")
    again.refresh_from_db()
    assert again.status == Status.CANCELLED


def test_a_verb_too_late_says_so(alice: User, failed: Job) -> None:
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    answer = client.post(f"/jobs/{failed.pk}/cancel/", follow=True)
    assert "ended already" in answer.content.decode()


def test_cancel_says_what_it_does(alice: User) -> None:
    text = text_of(page_of(alice, f"/jobs/{make_job(alice).pk}/"))
    assert "It has not started; it leaves the queue" in text


@pytest.mark.parametrize("status", Status.values)
def test_every_state_has_a_page(status: str, alice: User, bob: User, three_cards: list[Gpu]) -> None:
    job = make_job(alice, status=status, gpu_uuids=[three_cards[0].uuid], gpu_uuid=three_cards[0].uuid)
    for user in (alice, bob):
        text = text_of(page_of(user, f"/jobs/{job.pk}/"))
        assert status in text
        assert "None" not in text


def test_parameters_without_a_value_are_not_listed(alice: User) -> None:
    page = page_of(alice, f"/jobs/{make_job(alice, params={'steps': 7, 'journal': None}).pk}/")
    assert '<th scope="row">steps</th>' in page
    assert '<th scope="row">journal</th>' not in page


def test_a_card_that_is_gone_keeps_its_uuid_on_the_page(alice: User, failed: Job) -> None:
    Gpu.objects.all().delete()
    assert "GPU-…0001" in page_of(alice, f"/jobs/{failed.pk}/")


def test_a_job_of_a_kind_that_is_gone_still_has_its_page(alice: User) -> None:
    job = make_job(alice)
    Job.objects.update(kind="of_the_past")
    assert "of_the_past" in page_of(alice, f"/jobs/{job.pk}/")
    assert "of_the_past" in page_of(alice, "/jobs/")


def test_what_the_result_is_good_for(alice: User) -> None:
    job = Job.objects.create(
        kind="model_download", owner=alice, params={"source": "demo"}, status=Status.SUCCEEDED
    )
    Artifact.objects.create(type="model", name="smollm2", owner=alice, job=job)
    html = page_of(alice, f"/jobs/{job.pk}/")
    assert f"/new/activation_extraction/?model=job:{job.pk}" in html
    assert "smollm2" in html


def test_points_are_thinned_and_keep_the_last(alice: User) -> None:
    job = make_job(alice)
    JobMetric.objects.bulk_create(
        JobMetric(job=job, name="loss", step=n, value=1 / (n + 1)) for n in range(5000)
    )
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    steps, values = client.get(f"/jobs/{job.pk}/points/").json()["curves"]["loss"]
    assert len(steps) == len(values) <= 601
    assert steps[0] == 0
    assert steps[-1] == 4999


def test_a_work_that_is_stuck_says_so_and_what_to_do(alice: User, bob: User) -> None:
    job = make_job(alice, status="running", stalled=True)
    JobEvent.objects.create(job=job, event="stalled", detail="no progress for 1200 s")
    text = text_of(page_of(alice, f"/jobs/{job.pk}/"))
    assert "stalled" in text
    assert "It seems to be stuck: no progress for 1200 s" in text
    assert "seems to be stuck" not in text_of(page_of(bob, f"/jobs/{job.pk}/"))


@pytest.mark.parametrize(
    ("fields", "offered"),
    [
        ({"status": "running"}, {"pause"}),
        ({"status": "running", "pause_requested_at": timezone.now()}, set()),
        ({"status": "queued"}, set()),
        ({"status": "paused"}, {"resume", "finalize"}),
        ({"status": "failed"}, {"finalize"}),
        ({"status": "cancelled"}, {"finalize"}),
        ({"status": "succeeded"}, set()),
        ({"status": "failed", "kind": "model_download"}, set()),
    ],
)
def test_a_job_offers_the_verbs_of_its_state(alice: User, fields: dict[str, Any], offered: set[str]) -> None:
    job = make_job(alice, **fields)
    (paths.checkpoints(job) / "step-1").mkdir(parents=True)
    page = page_of(alice, f"/jobs/{job.pk}/")
    assert {verb for verb in ("pause", "resume", "finalize") if f"/jobs/{job.pk}/{verb}/" in page} == offered
