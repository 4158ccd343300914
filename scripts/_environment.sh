# Sourced by run, test and check: makes sure that .venv holds what pyproject.toml asks for.
#
#   ensure_environment runtime    the tool and ONNX Runtime
#   ensure_environment test       these and all that the tests and checks need
#
# Afterwards $environment_bin is the folder of the environment's programs. PYTHON chooses the
# interpreter for a new environment.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="$repository/.venv"

# Prints the first interpreter that onnxgc runs on and that can make an environment.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.12 python3.11 python3.13; do
        if "$candidate" -c '
import ensurepip, sys, venv
sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "onnxgc needs Python 3.11, 3.12 or 3.13 with venv; set PYTHON to one of them" >&2
    return 1
}

# Windows has Scripts where others have bin.
locate_programs() {
    environment_bin="$environment/bin"
    if [[ -d "$environment/Scripts" ]]; then
        environment_bin="$environment/Scripts"
    fi
}

# The build of ONNX Runtime for this machine; the CUDA build runs on the CPU too.
onnxruntime_extra() {
    case "$(uname -s)-$(uname -m)" in
        Linux-x86_64 | MINGW*-x86_64 | MSYS*-x86_64) echo cuda ;;
        *) echo cpu ;;
    esac
}

# Holds a lock while another call may be setting up the same environment.
with_lock() {
    if command -v flock >/dev/null; then
        (
            flock 9
            "$@"
        ) 9>"$repository/.venv.lock"
    else
        "$@"
    fi
}

# The programs of an environment that was moved or copied still point to the old place.
is_in_place() {
    grep -qF "$environment" "$environment_bin/activate"
}

# The stamp is written last, so an interrupted set-up is done again.
is_current() {
    local stamp
    for stamp in "$environment/.onnxgc-$1" "$environment/.onnxgc-test"; do
        if [[ -f "$stamp" && "$(<"$stamp")" == "$fingerprint" ]]; then
            return 0
        fi
    done
    return 1
}

set_up() {
    local kind="$1" extras="$2" python
    if is_current "$kind"; then
        return
    fi
    echo "onnxgc: setting up .venv for $kind [$extras]; the first time takes minutes" >&2
    locate_programs
    if ! "$environment_bin/python" -c '' >/dev/null 2>&1 || ! is_in_place; then
        python="$(find_python)"
        "$python" -m venv --clear "$environment"
        locate_programs
    fi
    rm -f "$environment"/.onnxgc-*
    # Twice quiet: errors only.
    "$environment_bin/python" -m pip install -qq --disable-pip-version-check --editable "$repository[$extras]" >&2
    echo "$fingerprint" >"$environment/.onnxgc-$kind"
}

# The light models are not tracked: they are built from their definitions in a second, vgg19 last.
build_missing_models() {
    if [[ ! -f "$repository/models/vgg19.onnx" ]]; then
        "$environment_bin/python" "$repository/scripts/build_models.py" >&2
    fi
}

ensure_environment() {
    local kind="$1" extras
    extras="$(onnxruntime_extra)"
    if [[ "$kind" == test ]]; then
        extras+=",test"
    fi
    # The folder belongs to it: an environment must be made again where it was moved to.
    fingerprint="$(cksum <"$repository/pyproject.toml") $repository"
    with_lock set_up "$kind" "$extras"
    locate_programs
    with_lock build_missing_models
}
