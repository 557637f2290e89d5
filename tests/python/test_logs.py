"""What a server logs of a run, as a program reads it."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
import torch
from models import load_model, loss_of, train

import shardmlp

LAYERS = 3


def events(server) -> list[dict]:
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


def train_and_fail(model, remote) -> None:
    """Two steps, a batch that is dropped, and a request that fails."""
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, range(2))
    loss_of(model, 2).backward()
    optimizer.zero_grad()
    with pytest.raises(shardmlp.Error):
        remote.restore("nowhere\n{}")


def test_a_line_a_step_with_the_ids_of_whose_it_is(folder, serve, offload):
    server = serve(folder("llama"), "--log-format=json")
    model = load_model(folder("llama"))
    remote = offload(model, server, run_id="mine")
    train_and_fail(model, remote)
    remote.close()
    server.stop()

    logged = events(server)
    assert all(datetime.fromisoformat(event["time"]).tzinfo and event["level"] for event in logged)
    of = {name: [e for e in logged if e["message"] == name] for name in {e["message"] for e in logged}}
    (opened,) = of["session opened"]
    assert (opened["run"], opened["role"], opened["trainers"]) == ("mine", "train", 1)
    committed = of["step committed"]
    assert [(e["level"], e["step"], e["session"]) for e in committed] == [
        ("info", step, opened["session"]) for step in (1, 2)
    ]
    assert all(e["gradient_norm"] > 0 and e["rows"] % LAYERS == 0 for e in committed)
    (discarded,) = of["attempt discarded"]
    assert (discarded["step"], discarded["attempt"]) == (2, 0)
    (failed,) = [event for event in of["rpc failed"] if event["reason"] != "LOADING"]
    assert (failed["level"], failed["method"]) == ("warning", "RestoreCheckpoint")
    assert failed["reason"] in ("UNKNOWN_CHECKPOINT", "INVALID_ARGUMENT")
    assert [e["session"] for e in of["session closed"]] == [opened["session"]]
    assert "draining" in of
    assert not any(message.startswith("call") for message in of), "calls are for the debug level"


def test_calls_are_logged_at_debug_with_their_ids(folder, serve, offload):
    server = serve(folder("llama"), "--log-format=json", "--log-level=debug")
    model = load_model(folder("llama"))
    remote = offload(model, server)
    loss_of(model, 0).backward()
    remote.close()
    server.stop()
    calls = [event for event in events(server) if event["message"] == "call answered"]
    forwards, backwards = ([call for call in calls if call["pass"] == each] for each in ("forward", "backward"))
    once = list(range(LAYERS))
    assert sorted(call["layer"] for call in forwards) == sorted(once + once), "offload's own comparison, and the model's"
    assert sorted(call["layer"] for call in backwards) == once
    assert len({call["session"] for call in calls}) == 1 and all(call["rows"] > 0 for call in calls)
    assert len({call["call"] for call in backwards} - {0}) == len(backwards)


def test_the_end_of_a_server_that_fails_is_a_line_too(tmp_path, serve):
    server = serve(tmp_path / "no-model", "--log-format=json")
    assert server.wait() == 1
    last = json.loads(server.log.read_text().splitlines()[-1])
    assert (last["level"], last["message"]) == ("error", "server ended")
    assert "no-model" in last["why"]


def test_text_is_the_default_and_worse_than_info_can_be_asked_for(folder, serve, offload):
    server = serve(folder("llama"), "--log-level=warning")
    model = load_model(folder("llama"))
    with offload(model, server) as remote:
        train_and_fail(model, remote)
    server.stop()
    lines = [line for line in server.log.read_text().splitlines() if "Z " in line]
    assert [line.split(" ", 2)[1] for line in lines] == ["warning"]
    assert "rpc failed method=RestoreCheckpoint" in lines[0]
