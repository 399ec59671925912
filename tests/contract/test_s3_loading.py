"""Loads from the real S3 server, with what passes counted by the proxy."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from surefoot import ckpt
from surefoot.ckpt.channel import Solo
from surefoot.ckpt.errors import StepMissingError
from surefoot.ckpt.loading.together import load_agreed
from surefoot.ckpt.store import open_store
from surefoot.ckpt.tools.inspect import find

pytestmark = [pytest.mark.slow, pytest.mark.s3]


def test_an_eighth_of_a_tensor_takes_an_eighth_of_its_bytes(s3_proxy: Any) -> None:
    """CKP-10: a tensor of 64 MiB, of which one reader wants an eighth."""
    value = torch.arange(16 * 2**20, dtype=torch.float32).view(64, 512, 512)
    ckpt.save(s3_proxy.root, 1, {"w": value})
    before = s3_proxy.nbytes_out("GetObject", key=".safetensors")
    found = ckpt.read(s3_proxy.root, 1, "w", [slice(16, 24)])
    assert torch.equal(found, value[16:24])
    read = s3_proxy.nbytes_out("GetObject", key=".safetensors") - before
    assert value.nbytes // 8 <= read <= value.nbytes // 8 + 4 * 2**20 + 64 * 2**10


def flip_a_bit(exchange: Any) -> None:
    """The answer's body comes with one bit that the server did not send."""
    answer = exchange.forward()
    exchange.send(dataclasses.replace(answer, body=answer.body[:-1] + bytes([answer.body[-1] ^ 1])))


def test_bytes_damaged_on_the_way_are_read_again_and_others_set_the_step_aside(s3_proxy: Any) -> None:
    """CKP-34 on S3: one answer that is wrong is asked for again; a store that always answers wrongly has a damaged step."""
    for step in (20, 40):
        ckpt.save(s3_proxy.root, step, {"w": torch.full((1000,), float(step))})
    key = find(open_store(s3_proxy.root), 40)[0].objects[0].key
    state = {"w": torch.zeros(1000)}
    once = s3_proxy.fault("GetObject", flip_a_bit, key=key, times=1)
    loaded = ckpt.load(s3_proxy.root, state)
    assert loaded is not None
    assert once.fired == 1
    assert (loaded.step, state["w"].unique().tolist()) == (40, [40.0])
    always = s3_proxy.fault("GetObject", flip_a_bit, key=key, times=None)
    loaded = ckpt.load(s3_proxy.root, state)
    always.stop()
    assert loaded is not None
    assert always.fired >= 2
    assert (loaded.step, state["w"].unique().tolist()) == (20, [20.0])
    assert key in loaded.passed_over[0][1]
    keys = [o.key for o in open_store(s3_proxy.root).list("gen-")]
    assert key in keys
    assert any(k.endswith("step-0000000040/aside.json") for k in keys)


def test_a_step_in_flight_is_not_there_yet(s3_proxy: Any) -> None:
    """CKP-28: step 20 is committed, and the request for step 40's manifest is on its way. The newest is step 20, whole; step 40
    is said not to be committed, or is waited for."""
    go, looked = threading.Event(), threading.Event()

    def hold(exchange: Any) -> None:
        exchange.receive()
        assert go.wait(60)
        exchange.send(exchange.forward())

    def notice(exchange: Any) -> None:
        exchange.send(exchange.forward())
        looked.set()

    saved, found = {"w": torch.full((1000,), 20.0)}, {"w": torch.zeros(1000)}
    with ckpt.Checkpointer(s3_proxy.root) as c:
        c.save(20, saved).wait()
        held = s3_proxy.fault("PutObject", hold, key="step-0000000040/manifest.json")
        handle = c.save(40, {"w": torch.full((1000,), 40.0)})
        try:
            assert held.begun.wait(60)
            loaded = ckpt.load(s3_proxy.root, found)
            assert loaded is not None
            assert (loaded.step, loaded.passed_over, found["w"].unique().tolist()) == (20, (), [20.0])
            with pytest.raises(
                StepMissingError, match="step 40 is not committed, though a save of it was begun"
            ):
                ckpt.load(s3_proxy.root, found, step=40)
            asked = s3_proxy.fault("ListObjectsV2", notice)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(
                    load_agreed, open_store(s3_proxy.root), Solo(), found, step=40, strict=True, wait_s=60
                )
                assert looked.wait(60)
                assert not waiting.done()
                go.set()
                loaded = waiting.result()
        finally:
            go.set()
        assert handle.wait() is not None
    assert loaded is not None
    assert (held.fired, asked.fired) == (1, 1)
    assert (loaded.step, found["w"].unique().tolist()) == (40, [40.0])
