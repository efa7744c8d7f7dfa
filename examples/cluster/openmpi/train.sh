#!/bin/bash
# Trains on hosts by Open MPI, one agent on each, and starts again what was lost:
#
#     ./train.sh host0,host1,host2,host3 python train.py
#
# RUN_DIR is a folder that all hosts see. FTMESH_OPTIONS has options of `ftmesh run`.
set -u
hosts=$1 && shift
export RUN_DIR=${RUN_DIR:-$PWD/run} PORT=${PORT:-25500} MAX_STARTS=${MAX_STARTS:-20}
export FTMESH_SECRET_FILE=$RUN_DIR/secret FTMESH_OPTIONS=${FTMESH_OPTIONS-}
mkdir -p "$RUN_DIR"
[ -s "$FTMESH_SECRET_FILE" ] || (umask 077 && openssl rand -hex 32 > "$FTMESH_SECRET_FILE")

agent() { # Open MPI says which host this is, and how many there are
    trap : TERM
    ftmesh run --join "$1:$PORT" --run-dir "$RUN_DIR" $FTMESH_OPTIONS -- "${@:2}"
    local status=$?
    echo $status > "$RUN_DIR/status/$OMPI_COMM_WORLD_RANK"
    exit $status
}
export -f agent

for ((start = 1; start <= MAX_STARTS; start++)); do
    rm -rf "$RUN_DIR/status" && mkdir "$RUN_DIR/status"
    # With --enable-recovery the others continue when an agent is killed. When a host is lost,
    # Open MPI ends all: then all that can be reached start again.
    mpirun --host "$hosts" --map-by ppr:1:node --enable-recovery \
        -x PATH -x RUN_DIR -x PORT -x FTMESH_SECRET_FILE -x FTMESH_OPTIONS -x 'BASH_FUNC_agent%%' \
        bash -c 'agent "$@"' agent "${hosts%%,*}" "$@"
    # The least status of all hosts is that of the run: hosts that are lost have 75 or above 128.
    status=$(cat "$RUN_DIR"/status/* 2> /dev/null | sort -n | head -n 1)
    case ${status:-75} in
    0 | 1 | 2 | 65 | 66 | 69 | 77 | 124 | 130 | 143) exit "$status" ;;
    esac
    echo "train.sh: status ${status:-none}: starts all again" >&2
    sleep 5
done
exit "${status:-75}"
