"""Bearer tokens of a file: who comes in, and a token that is replaced while calls go on."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from models import load_model, loss_of
from waiting import until

import shardmlp

OLD, NEW = "the-old-token-of-these-tests", "the-new-token-of-these-tests"


@pytest.fixture
def guarded(tmp_path, folder, serve):
    """A server that wants a token, and the file with those that it takes."""
    file = tmp_path / "server.tokens"
    file.write_text(f"{OLD}\n")
    server = serve(folder("llama"), f"--token-file={file}")
    server.await_serving()
    return server, file


def replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def refusal(target: str, file: Path | None) -> str:
    with pytest.raises(shardmlp.Error) as raised:
        shardmlp.connection.Connection(target, 1, shardmlp.Timeouts(), shardmlp.Credentials(token_file=file))
    assert (raised.value.code, raised.value.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    return str(raised.value)


def test_what_is_wrong_with_a_token_is_said_and_it_is_not_shown(guarded, tmp_path):
    server, _ = guarded
    wrong = tmp_path / "wrong"
    wrong.write_text("a-token-that-nobody-knows")
    assert "the call has no token" in refusal(server.target, None)
    assert "the call's token is none of the server's" in refusal(server.target, wrong)
    assert "can't read the token in /nowhere/token: No such file" in refusal(server.target, Path("/nowhere/token"))
    wrong.write_text("")
    assert f"the first line of {wrong} is no token" in refusal(server.target, wrong)
    wrong.write_text("two words")
    assert f"the first line of {wrong} is no token" in refusal(server.target, wrong)
    assert "nobody-knows" not in server.log.read_text() and OLD not in server.log.read_text()


def test_a_token_is_replaced_under_training_without_a_failed_call(guarded, folder, tmp_path):
    """Added on the server, then used by the trainer, then the old one is taken away: so no call ever lacks one."""
    server, servers = guarded
    own = tmp_path / "trainer.token"
    own.write_text(OLD)
    model = load_model(folder("llama"))
    remote = shardmlp.offload(
        model,
        server.target,
        credentials=shardmlp.Credentials(token_file=own),
        timeouts=shardmlp.Timeouts(retry=0),  # none is tried twice
    )
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    failures, done, steps = [], threading.Event(), [0]

    def train() -> None:
        try:
            while not done.is_set():
                loss_of(model, steps[0]).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps[0] += 1
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    spare = tmp_path / "spare.token"
    spare.write_text(NEW)
    old = tmp_path / "old.token"
    old.write_text(OLD)
    replace(servers, f"{OLD}\n{NEW}\n")
    until(lambda: comes_in(server.target, spare))
    replace(own, NEW)
    before = steps[0]
    until(lambda: failures or steps[0] >= before + 3)  # the calls that were under way are over
    replace(servers, f"{NEW}\n")
    until(lambda: not comes_in(server.target, old))
    before = steps[0]
    until(lambda: failures or steps[0] >= before + 3)
    done.set()
    trainer.join()
    assert not failures, failures
    remote.close()


def test_a_file_that_is_damaged_changes_nothing_and_is_told(guarded, tmp_path):
    server, servers = guarded
    old = tmp_path / "old.token"
    old.write_text(OLD)
    replace(servers, "short")
    said = until(lambda: re.findall(r"line 1: got 5 characters.*", server.log.read_text()))
    assert comes_in(server.target, old)
    replace(servers, f"{OLD}\n")
    until(lambda: "certificates and tokens are in order again" in server.log.read_text())
    assert len(said) == 1, "once, and not each second"


def test_the_environment_says_which_token(guarded, tmp_path, monkeypatch, folder):
    server, _ = guarded
    own = tmp_path / "own"
    own.write_text(OLD)
    monkeypatch.setenv("SHARDMLP_TOKEN_FILE", str(own))
    shardmlp.offload(load_model(folder("llama")), server.target).close()
    program = Path(os.environ["SHARDMLP_SERVER"]).parents[1] / "client/cli/shardmlpctl"
    run = subprocess.run([program, f"--target={server.target}", "info"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    run = subprocess.run(
        [program, f"--target={server.target}", "--token-file=/nowhere", "info"], capture_output=True, text=True
    )
    assert run.returncode == 3 and "can't read the token in /nowhere" in run.stderr


def comes_in(target: str, file: Path) -> bool:
    try:
        shardmlp.connection.Connection(target, 1, shardmlp.Timeouts(), shardmlp.Credentials(token_file=file))
    except shardmlp.Error as error:
        assert error.reason == "UNAUTHENTICATED"
        return False
    return True
