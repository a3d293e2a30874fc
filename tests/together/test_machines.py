"""The guides of docs/machines.md: their commands and files, run as far as one host can.

Slurm's own commands are stood in for by a dozen lines of shell, which start what they are given.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from draftcore_disagg.local import free_port

from draftcore.config import RunConfig
from draftcore.plugins.binding import bind
from draftcore.plugins.registry import load_plugins
from tests.together.conftest import NewProject, Project

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "machines.md").read_text()
MACHINES = ROOT / "examples" / "machines"
SRUN = """#!/bin/bash
tasks=1
while [[ $1 == --* ]]; do
    case $1 in --nodes=* | --ntasks=* | --ntasks-per-node=*) tasks=$((tasks * ${1#*=})) ;; esac
    shift
done
for ((at = 0; at < tasks; at++)); do SLURM_LOCALID=$at "$@" & tasks_of+=($!); done
for pid in "${tasks_of[@]}"; do wait $pid || code=$?; done
exit ${code:-0}
"""


def test_the_guide_for_two_hosts_trains_what_one_process_trains(
    tmp_path: Path, new_project: NewProject, original: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer has neither the data nor the run's folder; volatile features are gone then."""
    section = GUIDE.partition("## Two hosts by hand\n")[2].partition("\n## ")[0]
    config = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    lines = section.partition("```bash\n")[2].partition("```")[0].splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("draftcore")]
    monkeypatch.setenv("DRAFTCORE_SECRET", "0123456789abcdef" * 4)
    places = {
        "store": f"file:{tmp_path}/shared?volatile=yes",
        "channel": f"tcp://127.0.0.1:{free_port()}",
    }
    trainer = new_project(tmp_path / "trainer", **places)
    producer = new_project(tmp_path / "producer", **places)
    Path(producer.config["data"]["train"]).unlink()
    assert config.keys() <= trainer.config.keys()
    started = [
        host.start(verb, *arguments)
        for host, (_, verb, _, *arguments) in zip((trainer, producer), commands, strict=True)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert trainer.losses() == original.losses()
    assert not producer.run.exists()
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("machines", [1, 2])
def test_the_file_for_slurm_trains_on_the_first_machine_and_captures_on_the_others(
    tmp_path: Path, new_project: NewProject, original: Project, machines: int
) -> None:
    """With a single machine it starts nothing but ranks, which capture for themselves."""
    project = new_project(tmp_path / "job", store=f"file:{tmp_path}/shared?volatile=yes")
    python = f'#!/bin/bash\nexec {sys.executable} -m {{}} "$@"\n'
    told = '#!/bin/bash\necho "$(basename $0) $@"\n'
    tools = {
        "srun": SRUN,
        "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
        "draftcore": python.format("draftcore") if machines > 1 else told,
        "torchrun": f'#!/bin/bash\nexec {sys.executable} "${{@:3}}"\n' if machines > 1 else told,
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node[1-2]"}
    env = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    env |= {"SLURM_JOB_NUM_NODES": str(machines), "SLURM_GPUS_ON_NODE": "1"}
    command = ["bash", str(MACHINES / "slurm.sbatch"), str(project.yaml), "train.log_every=1"]
    done = subprocess.run(command, env=env, text=True, timeout=300, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if machines == 1:
        (line,) = done.stdout.splitlines()
        assert line.startswith("torchrun --standalone --nproc-per-node=1 -m draftcore train ")
        assert line.endswith(" train.log_every=1")
    else:
        assert project.losses() == original.losses()
        assert "samples captured here" in done.stdout


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields, of which those are required."""
    given = {"properties": properties, "required": required.split() or list(properties)}
    return {"type": "object", "additionalProperties": False, **given}


def each(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": schema}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
MOUNTS = each(fields(name=TEXT, mountPath=TEXT))
CONTAINER = fields(name=TEXT, image=TEXT, resources=fields(limits=TEXTS), volumeMounts=MOUNTS)
CLAIM = fields(claimName=TEXT)
VOLUME = fields(
    "name", name=TEXT, configMap=fields(name=TEXT), emptyDir=TEXTS, persistentVolumeClaim=CLAIM
)
POD = fields(spec=fields(containers=each(CONTAINER), volumes=each(VOLUME)))
GROUP = {"rayStartParams": TEXTS, "template": POD}
SIZES = {"replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}
WORKERS = fields("groupName template minReplicas maxReplicas", groupName=TEXT, **GROUP, **SIZES)
CLUSTER = fields(
    "headGroupSpec", headGroupSpec=fields("template", **GROUP), workerGroupSpecs=each(WORKERS)
)
# Of ray.io/v1, as KubeRay 1.7 publishes it, the fields that are used here.
ENDS = {"shutdownAfterJobFinishes": {"type": "boolean"}, "backoffLimit": COUNT}
JOB = fields(
    apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"}, metadata=fields(name=TEXT),
    spec=fields("entrypoint rayClusterSpec", entrypoint=TEXT, rayClusterSpec=CLUSTER, **ENDS),
)  # fmt: skip


def test_the_file_for_kubernetes_has_room_for_the_run_that_it_holds() -> None:
    settings, job = yaml.safe_load_all((MACHINES / "kuberay.yaml").read_text())
    jsonschema.validate(job, JOB)
    cluster = job["spec"]["rayClusterSpec"]
    pods = [
        one["template"]["spec"] for one in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        paths = {
            one["mountPath"]: volumes[one["name"]] for one in pod["containers"][0]["volumeMounts"]
        }
        assert paths["/config"]["configMap"]["name"] == settings["metadata"]["name"]
    *_, folder = job["spec"]["entrypoint"].partition("train ")
    config = RunConfig.model_validate(yaml.safe_load(settings["data"][Path(folder).name]))
    assert config.run.is_relative_to("/shared")
    topology = config.topology
    options = bind(load_plugins(), "launcher", topology.launcher, topology.options).options
    for request, count in ((options.rank, topology.ranks), (options.producer, topology.producers)):
        (name,) = request.resources
        (group,) = (
            one for one in cluster["workerGroupSpecs"] if name in str(one["rayStartParams"])
        )
        (given,) = shlex.split(group["rayStartParams"]["resources"])  # as KubeRay's shell reads it
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for asked, there in (
            (request.resources[name], json.loads(given)[name]),
            (request.gpus, int(limits["nvidia.com/gpu"])),
            (request.cpus, int(limits["cpu"])),
        ):
            assert asked * count <= there * group["replicas"]
