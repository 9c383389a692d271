# areal-lite on NVIDIA GPUs (driver for CUDA 13 on the host).
#   docker build -f docker/gpu.Dockerfile -t areal-lite:gpu .
#   docker run --rm -it --gpus all --shm-size=16g -v $PWD/runs:/areal-lite/runs -v $PWD/models:/models \
#     areal-lite:gpu train gsm8k_1node model.path=/models/NAME
# devel: FlashInfer compiles kernels with nvcc when an engine starts.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# python3-dev and gcc: Triton compiles its launchers against Python's headers. bubblewrap: the verifier `code`.
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libnuma1 bubblewrap \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /areal-lite
COPY pyproject.toml README.md LICENSE setup.sh ./
COPY areal_lite ./areal_lite
COPY actors ./actors
COPY launch ./launch
COPY examples/toy_games ./examples/toy_games
# jobs: what Ray jobs and KubeRay need of an image.
RUN PIP_NO_CACHE_DIR=1 ./setup.sh gpu && .venv/bin/pip install --no-cache-dir --editable '.[jobs]'

ENV PATH=/areal-lite/.venv/bin:$PATH
ENTRYPOINT ["areal-lite"]
CMD ["doctor"]
