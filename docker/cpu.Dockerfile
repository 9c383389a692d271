# areal-lite on a CPU, ready for the demo.
#   docker build -f docker/cpu.Dockerfile -t areal-lite:cpu .
#   docker run --rm -it --shm-size=2g -v $PWD/runs:/areal-lite/runs areal-lite:cpu train arith_cpu
FROM python:3.11-slim-bookworm

# libnuma1: vLLM's CPU kernels load it. util-linux: vLLM asks lscpu about the cores. bubblewrap: the verifier `code`.
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 util-linux bubblewrap \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /areal-lite
COPY pyproject.toml README.md LICENSE setup.sh ./
COPY areal_lite ./areal_lite
COPY actors ./actors
COPY launch ./launch
COPY examples/toy_games ./examples/toy_games
# jobs: what Ray jobs and KubeRay need of an image.
RUN PIP_NO_CACHE_DIR=1 ./setup.sh cpu && .venv/bin/pip install --no-cache-dir --editable '.[jobs]'

ENV PATH=/areal-lite/.venv/bin:$PATH
ENTRYPOINT ["areal-lite"]
CMD ["doctor"]
