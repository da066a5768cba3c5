"""The examples of docs/: they learn, and go on after a kill as if nothing had happened."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer

import shardkit
from shardkit.metadata.manifest import load
from tests.codecs import tokenizer_zoo
from tests.conversion.test_chats import TEMPLATE
from tests.conversion.text_corpora import few_words, write_lines

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
EVERY = 3  # steps between checkpoints

pytestmark = [pytest.mark.torchrun, pytest.mark.xdist_group("torchrun")]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    out = tmp_path_factory.mktemp("images") / "images"
    shardkit.convert(ROOT / "sample_data/images", to="wds", out=out, workers=1)
    return out


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    folder, essays = tmp_path_factory.mktemp("blocks"), ROOT / "sample_data/text/essays"
    tokenizer = ByteLevelBPETokenizer()
    files = [str(file) for file in sorted(essays.glob("*.txt"))]
    tokenizer.train(files, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = shardkit.TextOptions(tokenizer=folder / "tokenizer.json", seq_len=64)
    shardkit.convert(essays, to="arrow", out=folder / "blocks", text=text, workers=1)
    return folder / "blocks"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Packed conversations, in which the assistant repeats the word of the user."""
    folder, draw = tmp_path_factory.mktemp("chats"), random.Random(0)
    tokenizer_zoo.write_json(folder, few_words(400))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    words = [[f"w{draw.randrange(9)}" for _ in range(draw.randrange(1, 9))] for _ in range(150)]
    turns = ([turn for word in of for turn in roles(word)] for of in words)
    source = write_lines(folder / "chats.jsonl", ({"messages": one} for one in turns))
    text = shardkit.TextOptions(tokenizer=folder, chat_template="auto", seq_len=64)
    shardkit.convert(source, to="arrow", out=folder / "chats", text=text, workers=1)
    return folder / "chats"


def roles(word):
    return [{"role": role, "content": word} for role in ("user", "assistant")]


def command(example, folder, processes, steps, *options):
    """How to run an example in a folder of its own, alone or by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = torchrun if processes > 1 else []
    words = ["--batch", 4, "--steps", steps, "--checkpoint-every", EVERY, *options]
    files = ["--checkpoint", folder / "model.pt", "--log-file", folder / "log.jsonl"]
    return [sys.executable, *launcher, *map(str, [*example, *words, *files])]


def losses(folder):
    """Epoch, loss and number of learned tokens of each step in a log."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    about = ("epoch", "loss", "learned")
    return {line["step"]: tuple(map(line.get, about)) for line in map(json.loads, lines)}


def run_until(steps, example, folder, processes, *options):
    """What a run to its end logs."""
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").unlink(missing_ok=True)
    printed(command(example, folder, processes, steps, *options))
    return losses(folder)


def printed(words):
    run = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def kill_after(lines, example, folder, processes):
    """Start a run that would take hours, and kill all of it when it has printed so many steps."""
    folder.mkdir()
    process = subprocess.Popen(
        command(example, folder, processes, 1_000_000),
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    printed = []
    try:
        while sum(line.startswith("epoch") for line in printed) < lines:
            printed.append(process.stdout.readline())
            assert printed[-1], "".join(printed)
    finally:
        for number in [process.pid, *children(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.communicate(timeout=60)  # the pipe ends when the last process is gone
    return losses(folder)


def children(parent):
    """Processes that a process has started; those of torchrun are in groups of their own."""
    listed = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(number) for file in listed for number in file.read_text().split()]


@pytest.mark.parametrize(
    ("script", "dataset", "processes"), [("train_cnn", "images", 1), ("train_gpt", "blocks", 2)]
)
def test_a_killed_example_goes_on_with_the_losses_of_a_run_that_was_not(
    request, script, dataset, processes, tmp_path
):
    """S4, by real training: every digit of every step."""
    example = ROOT / f"docs/examples/{script}.py", request.getfixturevalue(dataset)
    before = kill_after(5, example, tmp_path / "run", processes)
    shutil.copytree(tmp_path / "run", tmp_path / "fewer")
    kept = torch.load(tmp_path / "run/model.pt", weights_only=True)["step"]
    assert kept in before
    end = kept + 30
    whole = run_until(end, example, tmp_path / "whole", processes)
    after = run_until(end, example, tmp_path / "run", processes, "--resume")

    assert list(whole) == list(range(1, end + 1))
    assert list(after) == list(range(kept + 1, end + 1)), f"killed behind step {kept}"
    assert {**before, **after} == whole, f"killed behind step {kept}"
    curve = [loss for _, loss, _ in whole.values()]
    assert sum(curve[-10:]) < sum(curve[:10]), "nothing was learnt"

    if processes == 2:  # the same samples by one process: sums of floats come in another order
        alone = run_until(kept + 8, example, tmp_path / "fewer", 1, "--resume")
        assert list(alone) == list(range(kept + 1, kept + 9))
        for step, (epoch, loss, learned) in alone.items():
            assert (epoch, pytest.approx(loss, rel=1e-3), learned) == whole[step]


def test_of_conversations_the_assistant_is_learned_by_any_number_of_processes(chats, tmp_path):
    """S4: a run by two processes goes on with one, with the tokens of a run by one process."""
    example, two = (ROOT / "docs/examples/train_gpt.py", chats), tmp_path / "two"
    whole = run_until(24, example, tmp_path / "one", 1)
    found = {**run_until(9, example, two, 2), **run_until(24, example, two, 1, "--resume")}
    assert list(found) == list(whole) == list(range(1, 25))
    for step, (epoch, loss, learned) in found.items():
        assert (epoch, pytest.approx(loss, rel=1e-3), learned) == whole[step]
    curve = [loss for _, loss, _ in whole.values()]
    assert sum(curve[-8:]) < sum(curve[:8]), "nothing was learnt"
    # In an epoch, each of the assistant's tokens is learned once.
    of_epoch = [learned for epoch, _, learned in whole.values() if epoch == 0]
    assert len(of_epoch) < len(whole)
    assert sum(of_epoch) == load(chats).text["learned"]


@pytest.mark.docs
def test_examples_of_audio_and_video_learn(tmp_path):
    """One after the other in one process, which has to import torch only once."""
    names = ("train_clips", "train_keywords")
    code = "import runpy, sys\n"
    for name in names:
        script = str(ROOT / f"docs/examples/{name}.py")
        words = [script, str(tmp_path / name), "--steps", "60"]
        code += f"sys.argv = {words}; runpy.run_path({script!r}, run_name='__main__')\n"
        (tmp_path / name).mkdir()
    lines = printed([sys.executable, "-c", code])
    losses = [float(line.split()[3]) for line in lines if "loss" in line]
    assert len(losses) == 60 * len(names)
    for learnt in (losses[:60], losses[60:]):
        assert sum(learnt[-10:]) < sum(learnt[:10]) / 3
