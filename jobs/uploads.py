"""Files that people bring: checked, written to staging, and moved into place as an artifact, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.db import IntegrityError, transaction
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response

from gpus.rest import ApiError, StrictJSONParser
from jobs import contents, paths, shelf
from jobs.api import ArtifactList
from jobs.memory import disk_reserve_bytes, gib
from jobs.models import Artifact
from jobs.people import Person
from jobs.serializers import ArtifactSerializer
from jobs.version import VERSION

#: All files of one upload together. What is larger belongs into a folder of MISTUDIO_IMPORT_ROOTS.
LIMIT_BYTES = 2 * 2**30
#: What a multipart body says beside its files.
FRAMING_BYTES = 64 * 2**10
#: A name that every job can refer to as it stands: no spaces, no `owner/`, nothing that looks like a path.
NAME = r"^(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]*\Z"
NAME_RULE = "Letters, digits, dot, dash and underscore, beginning with a letter or digit."


class UploadFields(serializers.Serializer[Any]):
    type = serializers.ChoiceField(choices=tuple(contents.TYPES))
    name = serializers.RegexField(NAME, max_length=150, error_messages={"invalid": NAME_RULE})
    file = serializers.ListField(
        child=serializers.FileField(max_length=200),
        allow_empty=False,
        help_text="The files, each as a part `file` of its own: a .txt, .jsonl, .parquet or .safetensors for a corpus; "
        "cfg.json, sae_weights.safetensors and, if there is one, sparsity.safetensors for an SAE.",
    )


class Artifacts(ArtifactList):
    """Everything that one may see, newest first. POST (multipart) makes one of files that come from elsewhere."""

    scope = "submit"
    parser_classes = [MultiPartParser, StrictJSONParser]

    @extend_schema(request={"multipart/form-data": UploadFields}, responses={201: ArtifactSerializer})
    def post(self, request: Request) -> Response:
        announced = request.META.get("CONTENT_LENGTH") or "0"
        if announced.isdecimal() and int(announced) > LIMIT_BYTES + FRAMING_BYTES:
            raise too_large(int(announced))  # before the body is parsed
        artifact = upload(request.user, request.data)  # type: ignore[arg-type]  # the fields refuse a list
        return Response(ArtifactSerializer(artifact).data, status=201)


def upload(user: Person, data: Mapping[str, Any]) -> Artifact:
    """Make an artifact of `user` out of what was sent. A refusal leaves no row and no file."""
    sent = checked(user, data)
    artifact = Artifact(type=sent["type"], name=sent["name"], owner=user)  # type: ignore[misc]  # signed in
    folder = settings.MISTUDIO_HOME / ".staging" / f"upload-{artifact.pk}"
    try:
        artifact.manifest = staged(folder, sent)
        artifact.size_bytes = paths.size_of(folder)
        publish(artifact, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return artifact


def checked(user: Person, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with all that can be refused before anything is written."""
    fields = UploadFields(data=data)
    fields.is_valid(raise_exception=True)
    sent = fields.validated_data
    total = sum(file.size for file in sent["file"])
    if total > LIMIT_BYTES:
        raise too_large(total)
    refuse_full_disk(total)
    sent["kept_as"] = contents.TYPES[sent["type"]].names([file.name for file in sent["file"]])
    if Artifact.objects.filter(type=sent["type"], owner_id=user.pk, name=sent["name"]).exists():
        raise shelf.taken(sent["type"])
    return sent


def too_large(size: int) -> ApiError:
    sentence = f"The upload is larger than {gib(LIMIT_BYTES)}."
    hint = "Put large files into a folder of MISTUDIO_IMPORT_ROOTS; jobs read them there."
    return ApiError(413, "too_large", sentence, limit_bytes=LIMIT_BYTES, size_bytes=size, hint=hint)


def refuse_full_disk(total: int) -> None:
    disk = shutil.disk_usage(settings.MISTUDIO_HOME)
    room = disk.free - disk_reserve_bytes(disk.total)
    if total > room:
        sentence = (
            f"The data disk has room for {gib(max(0, room))} beside its reserve; this needs {gib(total)}."
        )
        raise ApiError(
            503, "disk_full", sentence, hint="Delete artifacts or free the disk, then send it again."
        )


def staged(folder: Path, sent: Mapping[str, Any]) -> dict[str, Any]:
    """Write the files and their manifest below `folder`; the manifest."""
    folder.mkdir(parents=True)
    named = list(zip(sent["kept_as"], sent["file"], strict=True))
    manifest = {
        "kind": "upload",
        "version": VERSION,
        "files": {name: written(file, folder / name) for name, file in named},
        **contents.TYPES[sent["type"]].facts(folder),
    }
    paths.write_json(folder / "manifest.json", manifest)
    return manifest


def written(sent: UploadedFile, target: Path) -> dict[str, Any]:
    """Copy to `target`, safe against a power cut; name as sent, digest and size for the manifest."""
    digest = hashlib.sha256()
    with open(target, "xb") as file:
        for chunk in sent.chunks():
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"sent_as": sent.name, "sha256": digest.hexdigest(), "size_bytes": sent.size}


def publish(artifact: Artifact, folder: Path) -> None:
    """Row and folder together: who sees the row finds the files."""
    target = paths.artifact_folder(artifact)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with transaction.atomic():
            artifact.save(force_insert=True)
            os.rename(folder, target)
            paths.sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, IntegrityError):  # the same name, sent twice at once
            raise shelf.taken(artifact.type) from None
        raise
