"""What a worker demands of a vLLM server before it takes work, against a server that answers as the test says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from train_builders import save_tiny_model

from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError, EngineError
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.server_engine import ServerEngine

SETTINGS = {
    "model_config": {"dtype": "torch.float32", "max_model_len": 512, "logprobs_mode": "processed_logprobs"},
    "cache_config": {"enable_prefix_caching": True},
    "parallel_config": {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "worker_extension_cls": "areal_lite.weights.families.ParameterSquares",
    },
    "scheduler_config": {"enable_chunked_prefill": False, "max_num_seqs": 64},
    "weight_transfer_config": {"backend": "gloo"},
}  # fmt: skip


class FakeServer:
    """Answers every path as vLLM does; `status` has other answers by path, `settings` other settings by name."""

    def __init__(self, *, stamped: str = "default", status: Any = None, settings: Any = None) -> None:
        self.stamped, self.calls, self._status = stamped, list[str](), status or {}
        self._config = {key: {name: (settings or {}).get(name, value) for name, value in section.items()}
                        for key, section in SETTINGS.items()}  # fmt: skip

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.calls.append(path)
        if status := self._status.get(path):
            return web.Response(status=status, text="no")
        if path == "/update_weight_version":
            self.stamped = (await request.json())["new_version"]
        if path == "/metrics":
            return web.Response(text='vllm:generation_tokens_total{engine="0"} 2.0\n')
        span = {"version": self.stamped, "start": 0, "end": 1}
        content = {"content": [{"token_id": 1, "logprob": -0.5}]}
        choice = {"token_ids": [1], "finish_reason": "stop", "stop_reason": None, "logprobs": content}
        choices = {"choices": [choice | {"weight_versions": [span]}], "prompt_logprobs": None}
        return web.json_response({"vllm_config": self._config, "weight_version": self.stamped, **choices})


async def connected(folder: Path, *, serves: bool = True, variable: str | None = None, **answers: Any) -> Any:
    """Connect to a fake server, and generate at version 3 before and after it is restarted."""
    fake = FakeServer(**answers)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    address = site.name
    if not serves:
        await runner.cleanup()
    rollout = {"servers": [address], "server_key_env": variable, "workers": 1}
    config = parse_config({"run": {"start_timeout_s": 0.5}, "rollout": rollout})
    try:
        engine = await ServerEngine.connect(config, model_folder=str(folder), server=address)
        await engine.stamp(3)
        sample = await engine.generate([1], Sampling(max_new_tokens=1, temperature=1.0))
        fake.stamped = "default"
        try:
            await engine.generate([1], Sampling(max_new_tokens=1, temperature=1.0))
        except EngineError as error:
            return sample, str(error), fake.calls
        finally:
            await engine.close()
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_tokens_of_a_server_that_was_restarted_are_refused(model: Path) -> None:
    """An open update of a worker that died is closed first.

    Seen failing with the initial version taken for the last one stamped, and without closing an update.
    """
    sample, error, calls = asyncio.run(connected(model, stamped="another run/5"))
    assert [(span.version, span.start, span.end) for span in sample.spans] == [(3, 0, 1)]
    assert "must serve this worker alone" in error
    assert "got 'default'. The server was restarted" in error
    assert calls.index("/update_weights") < calls.index("/finish_weight_update") < calls.index("/inference/v1/generate")
    assert "/resume" not in calls  # before weights have come


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"serves": False}, ["must answer at http://127.0.0.1:", "Fix: start it: VLLM_SERVER_DEV_MODE=1", "--dtype"]),
        ({"status": {"/server_info": 404}}, ["got 404", "with the environment variable VLLM_SERVER_DEV_MODE=1"]),
        ({"status": {"/inference/v1/generate": 403}}, ["got 403", "start the server with --enable-scale-out"]),
        ({"status": {"/inference/v1/generate": 401}}, ["got 401", "set rollout.server_key_env"]),
        ({"variable": "NO_SUCH_KEY"}, ["must name a set variable, got NO_SUCH_KEY: export it"]),
        ({"settings": {"max_model_len": 64}}, ["--max-model-len 512", "got max_model_len=64"]),
        ({"settings": {"max_num_seqs": 8}}, ["--max-num-seqs 64", "got max_num_seqs=8"]),
        (
            {"settings": {"logprobs_mode": "raw_logprobs", "dtype": "torch.bfloat16", "tensor_parallel_size": 2}},
            ["--dtype float32 --logprobs-mode processed_logprobs --tensor-parallel-size 1, got dtype=bfloat16, "],
        ),
        ({"settings": {"backend": "nccl"}}, ["""--weight-transfer-config '{"backend": "gloo"}', got"""]),
        ({"settings": {"worker_extension_cls": ""}}, ["--worker-extension-cls areal_lite.weights.families"]),
    ],
    ids=lambda item: "" if isinstance(item, list) else str(item),
)
def test_a_server_that_does_not_fit_is_refused_with_the_option_to_add(
    answers: dict[str, Any], words: list[str], model: Path
) -> None:
    """Seen failing, one by one, with each setting left out of what is compared."""
    with pytest.raises((EngineError, ConfigError)) as caught:
        asyncio.run(connected(model, **answers))
    assert [word for word in words if word not in str(caught.value)] == []
    assert len(str(caught.value).splitlines()) == 1
