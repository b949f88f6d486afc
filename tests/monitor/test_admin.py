"""The admin shows everything, and lets nobody break an invariant."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from gpus.models import Gpu, GpuEvent, Host
from jobs.exceptions import Conflict
from jobs.models import Artifact, Attempt, Job, JobEvent, JobInput, JobMetric, Lease, Status
from monitor.signin import BACKEND

pytestmark = pytest.mark.django_db
MODELS = ("job", "attempt", "lease", "artifact", "jobinput", "jobevent", "jobmetric")


def page_of(user: User) -> Client:
    client = Client()
    client.force_login(user, backend=BACKEND)
    return client


@pytest.fixture
def root(db: None) -> Client:
    return page_of(User.objects.create_superuser("root"))


@pytest.fixture
def clerk(staff: User) -> Client:
    """Staff with every permission that can be given, but no superuser."""
    staff.user_permissions.set(Permission.objects.all())
    return page_of(staff)


@pytest.fixture
def job(alice: User, host: Host) -> Job:
    job = Job.objects.create(
        kind="sae_training", owner=alice, name="first", host=host, status=Status.RUNNING, attempt=1
    )
    attempt = Attempt.objects.create(
        job=job, number=1, host=host, boot_id="b", token_hash="proof-of-membership"
    )
    Lease.objects.create(resource="gpu:GPU-1", slot=0, attempt=attempt)
    artifact = Artifact.objects.create(type="sae", name="<b>odd</b>", owner=alice, job=job)
    JobInput.objects.create(job=job, parameter="model", artifact=artifact)
    JobEvent.objects.create(job=job, event="queued")
    JobMetric.objects.create(job=job, name="loss", step=1, value=None)
    return job


def test_it_lists_and_opens_every_row(root: Client, job: Job) -> None:
    for model in (Job, Attempt, Lease, Artifact, JobInput, JobEvent, JobMetric):
        row, name = model.objects.get(), model._meta.model_name
        page = root.get(f"/admin/jobs/{name}/")
        assert page.status_code == 200, name
        assert root.get(f"/admin/jobs/{name}/{row.pk}/change/").status_code == 200, name
        assert root.get(f"/admin/jobs/{name}/", {"q": "first"}).status_code == 200, name


def test_it_links_attempt_to_job_lease_to_attempt_and_job_to_artifacts(root: Client, job: Job) -> None:
    attempt = job.attempts.get()
    assert f'href="/admin/jobs/job/{job.pk}/change/"' in root.get("/admin/jobs/attempt/").content.decode()
    assert (
        f'href="/admin/jobs/attempt/{attempt.pk}/change/"' in root.get("/admin/jobs/lease/").content.decode()
    )
    jobs = root.get("/admin/jobs/job/").content.decode()
    assert f'href="/admin/jobs/artifact/?job__id__exact={job.pk}"' in jobs
    artifacts = root.get("/admin/jobs/artifact/", {"job__id__exact": job.pk}).content.decode()
    assert "&lt;b&gt;odd&lt;/b&gt;" in artifacts
    assert "<b>odd</b>" not in artifacts


def test_it_asks_a_fixed_number_of_questions(
    root: Client, job: Job, django_assert_max_num_queries: Any, alice: User
) -> None:
    for number in range(20):
        other = Job.objects.create(kind="sae_training", owner=alice, host=job.host)
        attempt = Attempt.objects.create(job=other, number=1, host=job.host, boot_id="b")
        Lease.objects.create(resource="gpu:GPU-1", slot=number + 1, attempt=attempt)
    for name in MODELS:
        with django_assert_max_num_queries(12):
            root.get(f"/admin/jobs/{name}/")


def test_it_keeps_the_proof_of_membership_to_itself(root: Client, job: Job) -> None:
    page = root.get(f"/admin/jobs/attempt/{job.attempts.get().pk}/change/").content.decode()
    assert "proof-of-membership" not in page


@pytest.mark.parametrize("who", ["root", "clerk"])
def test_it_adds_edits_and_deletes_nothing(request: pytest.FixtureRequest, job: Job, who: str) -> None:
    client = request.getfixturevalue(who)
    for name in MODELS:
        assert client.get(f"/admin/jobs/{name}/add/").status_code == 403, name
    for row in (job, job.attempts.get(), Lease.objects.get()):
        place = f"/admin/jobs/{row._meta.model_name}/{row.pk}"
        assert client.post(f"{place}/delete/", {"post": "yes"}).status_code == 403
        assert client.post(f"{place}/change/", {"status": "queued", "state": "ended"}).status_code == 403
    job.refresh_from_db()
    assert job.status == Status.RUNNING


def test_it_switches_sharing_of_an_artifact_and_nothing_else(root: Client, job: Job) -> None:
    artifact = job.artifacts.get()
    root.post(
        f"/admin/jobs/artifact/{artifact.pk}/change/", {"shared": "on", "name": "other", "type": "model"}
    )
    artifact.refresh_from_db()
    assert (artifact.shared, artifact.name, artifact.type) == (True, "<b>odd</b>", "sae")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, str]]:
    from jobs import verbs

    calls: list[tuple[str, Any, str]] = []

    def verb(name: str) -> Any:
        def call(job: Job, user: User) -> Job:
            if job.name == "no":
                raise Conflict("The job has ended already.")
            calls.append((name, job.pk, user.username))
            return job

        return call

    for name in ("cancel", "retry", "hold", "release"):
        monkeypatch.setattr(verbs, name, verb(name))
    return calls


@pytest.mark.parametrize("action", ["cancel", "retry", "hold", "release"])
def test_it_moves_jobs_through_the_verbs(
    root: Client, job: Job, alice: User, asked: list[Any], action: str
) -> None:
    no = Job.objects.create(kind="sae_training", owner=alice, name="no")
    chosen = {"action": action, "_selected_action": [job.pk, no.pk]}
    page = root.post("/admin/jobs/job/", chosen, follow=True).content.decode()
    assert asked == [(action, job.pk, "root")]
    assert "The job has ended already." in page


def test_it_offers_the_verbs_to_those_who_may_change_jobs(staff: User, job: Job, asked: list[Any]) -> None:
    staff.user_permissions.set(Permission.objects.filter(codename="view_job"))
    page = page_of(staff).post(
        "/admin/jobs/job/", {"action": "cancel", "_selected_action": [job.pk]}, follow=True
    )
    assert page.status_code == 200
    assert asked == []


def act(client: Client, model: str, action: str, *rows: Any) -> str:
    chosen = {"action": action, "_selected_action": [row.pk for row in rows]}
    return client.post(f"/admin/{model}/", chosen, follow=True).content.decode()


def test_it_holds_and_releases_for_real(root: Client, alice: User, job: Job) -> None:
    queued = Job.objects.create(kind="rehearsal", owner=alice, name="queued")
    page = act(root, "jobs/job", "hold", queued, job)
    assert "1 held." in page
    assert "Only a queued job can be held; this one is running." in page
    queued.refresh_from_db()
    assert queued.status == Status.HELD
    assert "1 released." in act(root, "jobs/job", "release", queued)
    assert JobEvent.objects.filter(job=queued, detail="by root").count() == 2


def test_it_leads_to_the_page_of_the_job(root: Client, job: Job) -> None:
    assert f'href="/jobs/{job.pk}/"' in root.get("/admin/jobs/job/").content.decode()
    assert f'href="/jobs/{job.pk}/"' in root.get(f"/admin/jobs/job/{job.pk}/change/").content.decode()


def test_it_drains_and_reopens_cards_with_an_event(root: Client, three_cards: list[Gpu]) -> None:
    assert "2 drained, 0 were so already." in act(root, "gpus/gpu", "drain", *three_cards[:2])
    assert "1 drained, 2 were so already." in act(root, "gpus/gpu", "drain", *three_cards)
    assert "3 reopened, 0 were so already." in act(root, "gpus/gpu", "reopen", *three_cards)
    assert Gpu.objects.filter(enabled=True).count() == 3
    told = GpuEvent.objects.filter(uuid=three_cards[0].uuid).order_by("at").values_list("event", "detail")
    assert list(told) == [
        ("changed", "enabled = False (by root)"),
        ("changed", "enabled = True (by root)"),
    ]


def test_who_may_only_look_drains_nothing(staff: User, three_cards: list[Gpu]) -> None:
    staff.user_permissions.set(Permission.objects.filter(codename="view_gpu"))
    act(page_of(staff), "gpus/gpu", "drain", *three_cards)
    assert Gpu.objects.filter(enabled=True).count() == 3


def test_a_host_is_never_saved_over_what_its_agent_wrote(root: Client, host: Host) -> None:
    assert root.post(f"/admin/gpus/host/{host.pk}/change/", {}).status_code == 403


def test_it_lets_nobody_edit_periodic_tasks(clerk: Client) -> None:
    """Who may edit one may call any task with any arguments."""
    interval = IntervalSchedule.objects.create(every=5, period="seconds")
    task = PeriodicTask.objects.create(name="dispatch", task="jobs.tasks.dispatch", interval=interval)
    place = "/admin/django_celery_beat/periodictask"
    assert clerk.get(f"{place}/").status_code == 200
    assert clerk.get(f"{place}/add/").status_code == 403
    assert clerk.post(f"{place}/{task.pk}/change/", {"task": "os.system"}).status_code == 403
    assert clerk.post(f"{place}/{task.pk}/delete/", {"post": "yes"}).status_code == 403
    for model in ("intervalschedule", "crontabschedule", "clockedschedule", "solarschedule"):
        assert clerk.get(f"/admin/django_celery_beat/{model}/").status_code == 404
    actions = clerk.post(f"{place}/", {"action": "run_tasks", "_selected_action": [task.pk]}, follow=True)
    assert actions.status_code == 200


def test_it_sends_strangers_and_plain_users_to_the_one_sign_in_page(alice: User) -> None:
    for client in (Client(), page_of(alice)):
        answer = client.get("/admin/jobs/job/", follow=True)
        assert answer.redirect_chain[-1][0].startswith("/signin/?next=%2Fadmin%2Fjobs%2Fjob%2F")


def test_it_registers_no_token_table() -> None:
    assert not [
        model
        for model in admin.site._registry
        if model._meta.model_name in ("authtoken", "apitoken", "onetimekey")
    ]
