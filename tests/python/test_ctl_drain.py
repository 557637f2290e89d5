"""shardmlpctl drain against real servers: what it does, who may ask for it, and how it says what came of it.
test_drain.py has what a drain itself does."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from certificates import Authority
from ctl import ctl, finish, start
from cutting_proxy import CuttingProxy
from health import ready
from links import connect
from models import load_model, train
from waiting import until

import shardmlp

KEEP = ("--restore=latest", "--drain-checkpoint=drain")
ASKED = 'grpc_server_started_total{grpc_method="Drain",grpc_service="shardmlp.v1.Operation",grpc_type="unary"}'
QUICK = shardmlp.Timeouts(connect=2, retry=0)
ALLOWED = ("--allow-drain", *KEEP)


@contextmanager
def open_call(server, folder):
    """A forward of ``server`` that has begun; given what ends it and returns what it gave."""
    proxy = CuttingProxy(lambda: connect(server.target))
    model = load_model(folder("llama"))
    with shardmlp.offload(model, proxy.target, timeouts=QUICK, resume=True), ThreadPoolExecutor(1) as pool:
        proxy.hold_at(2)  # the header and the rows; the end of the call is to come
        call = pool.submit(lambda: model.model.layers[1].mlp(torch.ones(5, 48)))
        until(lambda: server.metric("shardmlp_open_calls") == 1)

        def release():
            proxy.release()
            return call.result(timeout=30)

        yield release
        proxy.drop()
        call.exception(timeout=30)
    proxy.close()


def test_a_drained_server_has_finished_its_calls_saved_itself_and_gone(folder, serve, offload):
    server = serve(folder("llama"), *ALLOWED, "--metrics-address=127.0.0.1:0", "--drain-timeout=10m")
    server.await_serving()
    model = load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, range(2))
    remote.close()
    with open_call(server, folder) as release:
        draining = start(server.target, "drain", "--json")
        until(lambda: not ready(server.target))
        assert server.metric("shardmlp_open_calls") == 1 and draining.poll() is None
        release()
    outcome = finish(draining)
    assert (outcome.code, server.wait()) == (0, 0), outcome
    said = json.loads(outcome.out)
    assert said["step"] == said["checkpoint"]["step"] == 2 and said["checkpoint"]["name"] == "drain"
    assert not said["cut_off"] and not said["step_undecided"]
    assert "1 calls open" in outcome.said
    assert "asked_by=client" in server.log.read_text()

    server.start()
    server.await_serving(2)
    assert "restored checkpoint drain, step 2" in server.log.read_text()


def test_a_server_that_nobody_permitted_to_refuses_and_serves_on(folder, serve):
    server = serve(folder("llama"))
    server.await_serving()
    outcome = ctl(server.target, "drain")
    assert outcome.code == 3 and "[PERMISSION_DENIED, PERMISSION_DENIED]" in outcome.said, outcome
    assert ready(server.target)
    assert ctl(server.target, "info").code == 0
    assert "reason=PERMISSION_DENIED" in server.log.read_text(), "who tried is in the log"


def test_a_token_is_a_permission(folder, serve, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-an-operator\n")
    server = serve(folder("llama"), f"--token-file={tokens}")
    server.await_serving()
    assert "UNAUTHENTICATED" in ctl(server.target, "drain").said
    assert ready(server.target)
    assert ctl(server.target, "drain", f"--token-file={tokens}").code == 0
    assert server.wait() == 0


def test_a_certificate_is_a_permission_where_the_server_asks_for_one(folder, serve, tmp_path):
    authority = Authority(tmp_path / "authority")
    server = serve(
        folder("llama"), "--listen=127.0.0.1:0", *authority.issue().flags(), f"--tls-client-ca={authority.ca}"
    )
    server.await_serving()
    own = authority.issue("operator")
    known = (f"--tls-ca={authority.ca}", f"--tls-cert={own.cert}", f"--tls-key={own.key}")
    tls = re.findall(r"serving on unix:\S+, (\S+)", server.log.read_text())[-1]
    assert "PERMISSION_DENIED" in ctl(server.target, "drain").said, "the socket beside it knows nobody"
    outcome = ctl(tls, "drain", *known)
    assert (outcome.code, server.wait()) == (0, 0), outcome

    anyone = serve(folder("llama"), "--listen=127.0.0.1:0", *authority.issue().flags())
    anyone.await_serving()
    tls = re.findall(r"serving on unix:\S+, (\S+)", anyone.log.read_text())[-1]
    assert "PERMISSION_DENIED" in ctl(tls, "drain", *known).said, "it does not look at certificates"
    assert ready(anyone.target)


def test_a_drain_that_takes_longer_goes_on_and_whoever_asks_again_waits_for_the_same_end(folder, serve):
    server = serve(folder("llama"), *ALLOWED, "--metrics-address=127.0.0.1:0", "--drain-timeout=10m")
    server.await_serving()
    with open_call(server, folder) as release:
        outcome = ctl(server.target, "drain", "--timeout=1500ms")
        assert outcome.code == 4 and "has not drained in time, and goes on" in outcome.said, outcome
        assert not ready(server.target)
        again = start(server.target, "drain")
        until(lambda: server.metric(ASKED) == 2)
        release()
    outcome = finish(again)
    assert (outcome.code, server.wait()) == (0, 0), outcome
    assert "saved drain: step 0" in outcome.out


def test_sigterm_after_a_drain_was_asked_for_is_the_same_wish_and_no_second_one(folder, serve):
    """As where a pod is deleted whose server is being drained."""
    server = serve(folder("llama"), *ALLOWED, "--metrics-address=127.0.0.1:0", "--drain-timeout=10m")
    server.await_serving()
    with open_call(server, folder) as release:
        draining = start(server.target, "drain")
        until(lambda: not ready(server.target))
        server.terminate()
        assert release().shape == (5, 48)
    assert (finish(draining).code, server.wait()) == (0, 0)


def test_calls_that_had_to_be_cut_off_are_told(folder, serve):
    server = serve(folder("llama"), *ALLOWED, "--metrics-address=127.0.0.1:0", "--drain-timeout=200ms")
    server.await_serving()
    with open_call(server, folder):
        outcome = ctl(server.target, "drain")
    assert outcome.code == 1 and "CUT OFF" in outcome.out, outcome
    assert server.wait() == 0


def test_a_server_that_can_not_save_itself_says_so_and_ends(folder, serve):
    server = serve(folder("llama"), *ALLOWED)
    server.await_serving()
    (server.checkpoints / "drain").write_text("no checkpoint")
    outcome = ctl(server.target, "drain")
    assert outcome.code == 3 and "the drained server could not be saved" in outcome.said, outcome
    assert server.wait() == 1


def test_a_server_that_dies_meanwhile_is_not_taken_for_drained(folder, serve):
    server = serve(folder("llama"), *ALLOWED, "--metrics-address=127.0.0.1:0", "--drain-timeout=10m")
    server.await_serving()
    with open_call(server, folder):
        draining = start(server.target, "drain")
        until(lambda: not ready(server.target))
        server.kill()
        outcome = finish(draining)
    assert outcome.code == 3 and "without a word of what it left" in outcome.said, outcome


@pytest.mark.parametrize("arguments, code", [(("drain",), 3), (("drain", "--timeout=0s"), 2)])
def test_no_server_and_a_wrong_command_line_have_codes_of_their_own(tmp_path, arguments, code):
    assert ctl(f"unix:{tmp_path}/none", "--connect-timeout=100ms", *arguments).code == code
