"""The scripts of docs/cluster.md, run as Slurm, Kubernetes and ssh would run them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import shardkit
from tests.conftest import files_of
from tests.test_docs import BLOCK, CLUSTER, MODULE, ROOT, run_blocks

PARTS = "2"  # instead of the page's, as each takes a second to start
SBATCH = """#!/bin/bash
# Runs a job at once: for each index of an array, what is wrapped or the script.
dependency= array= wrap= number=$(date +%s%N)
while [ $# -gt 0 ]; do
  case $1 in
    --parsable) ;;
    --dependency=*) dependency=${1#*=} ;;
    --array=*) array=${1#*=} ;;
    --wrap) wrap=$2; shift ;;
    *) script=$1 ;;
  esac
  shift
done
[ -z "$wrap" ] && array=$(sed -n 's/^#SBATCH --array=//p' "$script")
for index in $(seq $(echo "${array:-1}" | tr - ' ')); do
  export SLURM_ARRAY_TASK_ID=$index
  [ -n "$wrap" ] || wrap=$(cat "$script")
  bash -c "$wrap" >> jobs.log 2>&1 || echo "$dependency: $wrap" >> failed
done
echo "$number"
"""


@pytest.fixture(scope="module")
def blocks():
    """The files of the page, with fewer parts, and small shards of the few images."""
    found = {}
    for match in BLOCK.finditer(CLUSTER.read_text("utf-8")):
        if named := MODULE.fullmatch(match["before"]):
            number = r"(?<=--array=1-)8\b|(?<=parts=)8\b|(?<=/)8\b|(?<=completions: )8\b"
            code = re.sub(number, PARTS, match["code"])
            found[named[1]] = code.replace("--resize 256", "--shard-size 8kB")
    return found


@pytest.fixture
def folder(tmp_path):
    """What all machines share: the source, and what one machine makes of it."""
    shutil.copytree(ROOT / "sample_data/images", tmp_path / "images")
    shardkit.convert(tmp_path / "images", "wds", tmp_path / "whole", shard_size="8kB", workers=0)
    (tmp_path / "bin").mkdir()
    return tmp_path


def bash(script: str, folder: Path, *, check: int = 0, **environ: str) -> str:
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env, words = {**os.environ, "PATH": path, **environ}, ["bash", "-c", script]
    found = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == check, found.stdout + found.stderr
    return found.stdout + found.stderr


def assert_whole(folder: Path) -> None:
    assert files_of(folder / "made") == files_of(folder / "whole")
    assert not (folder / "made.partial").exists()


@pytest.mark.docs
def test_the_jobs_of_slurm_make_the_dataset_and_check_it(blocks, folder):
    """A part that is missing is named, and run again."""
    for name in ("convert.sbatch", "submit.sh"):
        (folder / name).write_text(blocks[name].replace("/shared", str(folder)), "utf-8")
    (folder / "bin/sbatch").write_text(SBATCH)
    (folder / "bin/sbatch").chmod(0o755)
    bash("bash submit.sh", folder)
    assert not (folder / "failed").exists(), (folder / "jobs.log").read_text()
    assert_whole(folder)
    assert (folder / "jobs.log").read_text().count("sound:") == int(PARTS)
    shutil.rmtree(folder / "made")
    script = (folder / "convert.sbatch").read_text("utf-8")
    bash(script, folder, SLURM_ARRAY_TASK_ID="1")
    assert "2/2 never began" in bash("shardkit merge made", folder, check=2)
    bash(script, folder, SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_TASK_COUNT="1")
    bash("shardkit merge made", folder)
    assert_whole(folder)


def expanded(text: str, environ: dict[str, str]) -> str:
    """As Kubernetes replaces $(NAME) of a variable that it knows, and leaves what it does not."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else environ.get(m[2], m[0]), text
    )


def test_numbers_of_parts_and_the_job_of_kubernetes_agree(blocks):
    for text in blocks.values():
        assert re.findall(r"(?:--array=1-|parts=|completions: |/)(\d+)\b", text) == [PARTS] * 2
    job = yaml.safe_load(blocks["convert.yaml"])
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert spec["completionMode"] == "Indexed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # which limits per index demand
    (found,) = spec["template"]["spec"]["containers"]
    assert f"))/{spec['completions']}" in found["args"][0]


@pytest.mark.docs
def test_the_pods_of_kubernetes_make_the_dataset(blocks, folder):
    job = yaml.safe_load(blocks["convert.yaml"])
    (about,) = job["spec"]["template"]["spec"]["containers"]
    for index in range(int(PARTS)):
        environ = {"JOB_COMPLETION_INDEX": str(index)}
        words = [expanded(word, environ) for word in (*about["command"], *about["args"])]
        assert words[:2] == ["bash", "-c"]
        (command,) = words[2:]
        bash(command.replace("s3://datasets", str(folder)), folder, **environ)
    merge = re.search(r"&& (shardkit merge s3://\S+)", CLUSTER.read_text("utf-8"))
    assert merge is not None
    bash(merge[1].replace("s3://datasets", str(folder)), folder)
    assert_whole(folder)


@pytest.mark.docs
def test_code_blocks_run(folder, monkeypatch):
    """Those of the page's shell: ssh runs what follows the name of a machine on this one."""
    (folder / "bin/ssh").write_text('#!/bin/bash\nshift\nexec bash -c "$*"\n')
    (folder / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    run_blocks(CLUSTER.read_text("utf-8"), folder)
    assert_whole(folder)


@pytest.mark.large  # Ray takes ten seconds to start
def test_the_command_for_ray_makes_the_dataset(folder):
    """The first of the page, on a cluster of this machine; conversion/test_ray.py has real ones."""
    pytest.importorskip("ray")
    blocks = [match["code"] for match in BLOCK.finditer(CLUSTER.read_text("utf-8"))]
    (command,) = [
        line for code in blocks for line in code.splitlines() if line.endswith("--engine ray")
        and line.startswith("shardkit convert /shared")
    ]  # fmt: skip
    command = command.replace("/shared", str(folder)).replace("--resize 256", "--shard-size 8kB")
    bash(f"{command} --ray-address local --workers 2", folder)
    assert_whole(folder)
