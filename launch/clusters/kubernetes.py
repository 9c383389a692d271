"""Kind kubernetes: one RayJob of the KubeRay operator, with its files in a ConfigMap, managed through kubectl."""

import gzip
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import yaml
from jsonschema import Draft202012Validator
from pydantic import Field

from areal_lite.config.section import Section
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.fit import shipped
from areal_lite.launch.clusters.job import Job, Kind, Status
from areal_lite.launch.clusters.remote import output_of, render

_FILES = "/etc/areal-lite"
_MANIFEST, _SECRET = "rayjob.yaml", "secret.yaml"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,44}[a-z0-9])?")
"""KubeRay makes further names from it, which end at 63 letters."""


class _Plain(yaml.SafeDumper):
    """For people: files as blocks."""


_TEXT = "tag:yaml.org,2002:str"
_Plain.add_representer(str, lambda made, text: made.represent_scalar(_TEXT, text, style="|" if "\n" in text else None))


class KubernetesSettings(Section):
    """A Kubernetes cluster with the KubeRay operator."""

    image: str | None = None
    """image with areal-lite, see docker/"""
    namespace: str = "default"
    """namespace of the job"""
    context: str | None = None
    """context of kubectl; null = the current one"""
    claim: str | None = None
    """persistent volume claim that is mounted as shared on every node"""
    cpus: int = Field(8, ge=1)
    """cores of a node"""
    memory: str = "64Gi"
    """memory of a node"""
    patch: dict[str, Any] = {}
    """merged into the RayJob: mappings by key, lists of named items by name; other values replace, null removes"""


class Kubernetes(Kind):
    """Head and workers are pods of the same size; the head's is the first node."""

    Settings = KubernetesSettings
    sets_env = True

    def ships(self, job: Job) -> bool:
        """Return True: pods share the claim alone."""
        return True

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return the manifest."""
        return {_MANIFEST: _to_yaml(*manifest(job))}

    def secrets(self, job: Job) -> Mapping[str, str]:
        """Return the Secret from which every pod takes the values of `env`."""
        if not job.profile.env:
            return {}
        place = {"name": job.name, "namespace": self.settings(job).namespace}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": place, "stringData": job.profile.env}
        return {_SECRET: _to_yaml(secret)}

    def check(self, job: Job) -> Sequence[str]:
        """Compare the manifest with KubeRay's schema."""
        kubernetes, found = self.settings(job), []
        if not kubernetes.image:
            found.append("kubernetes.image must name an image with areal-lite and ray[default], got none: see docker/")
        if not kubernetes.claim:
            found.append("kubernetes.claim must name the volume claim behind shared, got none: pods share nothing else")
        if not _NAME.fullmatch(job.name):
            found.append(
                f"a job on kubernetes has at most 46 of a-z, 0-9 and -, got {job.name!r}: choose another --name"
            )
        config_map, rayjob = manifest(job)
        if (size := sum(map(len, map(str.encode, config_map["data"].values())))) > 2**20:
            found.append(f"recipe and plug-ins must fit into a ConfigMap of 1 MiB, got {size} bytes: make them smaller")
        return [*found, *schema_problems(rayjob)]

    def submit(self, job: Job) -> str:
        """Hand the manifest to the cluster."""
        for name in (_SECRET, _MANIFEST):
            if (job.files / name).exists():
                _kubectl(job, "apply", "-f", str(job.files / name))
        return f"{self.settings(job).namespace}/{job.name}"

    def status(self, job: Job) -> Status:
        """Ask the RayJob; KubeRay gives the exit code in a sentence."""
        state = _rayjob_status(job)
        words = " ".join(filter(None, [state.get("jobDeploymentStatus"), state.get("jobStatus"), state.get("message")]))
        if state.get("jobDeploymentStatus") == "Complete" and state.get("jobStatus") == "SUCCEEDED":
            return Status(words, code=0)
        if state.get("jobDeploymentStatus") in ("Complete", "Failed"):
            found = re.search(r"exit code (\d+)", words)
            return Status(words, code=int(found[1]) if found else 1)
        return Status(words or "waiting for the operator")

    def logs(self, job: Job) -> str:
        """Return the log of the pod that submitted it, which follows the run."""
        state = self.status(job)
        try:
            return _kubectl(job, "logs", f"job/{job.name}", "--tail=-1")
        except ConfigError:
            if state.code is None:
                return ""  # there is no pod yet
            raise

    def stop(self, job: Job) -> None:
        """Send SIGTERM to the supervisor in the head's pod."""
        there, _ = shipped(job, _FILES)
        head = f"ray.io/cluster={_rayjob_status(job).get('rayClusterName')},ray.io/node-type=head"
        pod = _kubectl(job, "get", "pods", "-l", head, "-o", "name").strip()
        if not pod:
            raise ConfigError(f"the head's pod of {job.name} must run, got none: kubectl delete rayjob {job.name}")
        _kubectl(job, "exec", pod, "--", "sh", "-c", f"kill -TERM $(cat {shlex.quote(f'{there.files}/pid')})")


def manifest(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap with the job's files, and the RayJob, with the profile's patch in it."""
    kubernetes, (there, files) = Kubernetes().settings(job), shipped(job, _FILES)
    pid = shlex.quote(f"{there.files}/pid")
    text = render(
        "rayjob.yaml",
        job=job,
        kubernetes=kubernetes,
        paths=sorted(files),
        folder=_FILES,
        ray_version=version("ray"),
        save=f"pid=$(cat {pid}) && kill -TERM $pid && while kill -0 $pid; do sleep 1; done",
    )
    config_map, rayjob = yaml.safe_load_all(text)
    config_map["data"] = {f"file-{index}": files[path] for index, path in enumerate(sorted(files))}
    return config_map, merged(rayjob, kubernetes.patch)


def merged(old: Any, patch: Any) -> Any:
    """Merge a patch into a manifest.

    Mappings merge by key, and null removes one; lists merge by name if all of their items have one (`mountPath` of a
    mount, `groupName` of a group of workers, else `name`); any other value replaces what was there.

    >>> merged({"a": 1, "b": [{"name": "x", "c": 2}]}, {"a": None, "b": [{"name": "x", "d": 3}, {"name": "y"}]})
    {'b': [{'name': 'x', 'c': 2, 'd': 3}, {'name': 'y'}]}
    >>> merged({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]})
    {'tolerations': [{'key': 'b'}]}
    """
    if isinstance(old, Mapping) and isinstance(patch, Mapping):
        both = {**old, **{key: merged(old.get(key), value) for key, value in patch.items()}}
        return {key: value for key, value in both.items() if value is not None}
    if isinstance(old, list) and isinstance(patch, list) and all(map(_name_of, [*old, *patch])):
        items = {_name_of(item): item for item in old}
        for item in patch:
            items[_name_of(item)] = merged(items.get(_name_of(item)), item)
        return list(items.values())
    return patch


def _name_of(item: Any) -> Any:
    names = ("mountPath", "groupName", "name")
    return next((item[name] for name in names if name in item), None) if isinstance(item, Mapping) else None


def schema_problems(rayjob: Mapping[str, Any]) -> list[str]:
    """Return what KubeRay's custom resource definition (v1.7.0, ray.io/v1) forbids, unknown keys included."""
    packed = Path(__file__).with_name("kuberay") / "rayjob-v1.json.gz"
    errors = Draft202012Validator(json.loads(gzip.decompress(packed.read_bytes()))).iter_errors(rayjob)
    return [
        f"rayjob.yaml must be a RayJob of KubeRay 1.7, got at {error.json_path}: {error.message}" for error in errors
    ]


def _rayjob_status(job: Job) -> dict[str, Any]:
    status = json.loads(_kubectl(job, "get", "rayjob", job.name, "-o", "json")).get("status", {})
    return cast("dict[str, Any]", status)


def _to_yaml(*documents: Mapping[str, Any]) -> str:
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)


def _kubectl(job: Job, *words: str) -> str:
    kubernetes = Kubernetes().settings(job)
    context = [f"--context={kubernetes.context}"] if kubernetes.context else []
    namespace = f"--namespace={kubernetes.namespace}"
    return output_of("kubectl", *context, namespace, *words, fix="see kubernetes in the profile")
