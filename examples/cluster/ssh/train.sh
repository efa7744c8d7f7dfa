#!/bin/bash
# Trains on hosts by ssh, one agent on each, and starts again agents that ask for it:
#
#     ./train.sh host0,host1,host2,host3 python train.py
#
# RUN_DIR is a folder that all hosts see. FTMESH_OPTIONS has options of `ftmesh run`, SSH_OPTIONS of ssh.
set -u
IFS=, read -ra hosts <<< "$1" && shift
run_dir=${RUN_DIR:-$PWD/run} max_starts=${MAX_STARTS:-20}
mkdir -p "$run_dir"
[ -s "$run_dir/secret" ] || (umask 077 && openssl rand -hex 32 > "$run_dir/secret")

words="ftmesh run --join ${hosts[0]}:${PORT:-25500} --hosts ${#hosts[@]} --run-dir ${run_dir@Q}"
remote="cd ${PWD@Q} && FTMESH_SECRET_FILE=${run_dir@Q}/secret exec $words ${FTMESH_OPTIONS-}"

pids=() stop=

agent() { # on host $1
    local index=$1 status start child=
    shift
    trap 'stop=1; [ -z "$child" ] || kill "$child"' TERM
    for ((start = 1; start <= max_starts; start++)); do
        # A host that does not answer for 15 s is lost. -tt: the agent ends with the connection.
        run ssh -tt -o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=5 ${SSH_OPTIONS-} \
            "${hosts[index]}" "$remote --host-index $index --node-name ${hosts[index]} -- ${*@Q}"
        status=$?
        [ -z "$stop" ] || status=143
        echo $status > "$run_dir/status/$index"
        case $status in
        75 | 76 | 255) ;; # 255: the connection was lost, and the host may come back
        *) return ;;
        esac
        grep -qx 0 "$run_dir"/status/* && return # the others are done
        run sleep 5
        [ -z "$stop" ] || { echo 143 > "$run_dir/status/$index" && return; }
    done
}

run() { # a command that the trap of TERM can end
    "$@" &
    child=$!
    [ -z "$stop" ] || kill "$child"
    wait "$child"
    local status=$?
    [ -z "$stop" ] || wait "$child" # the trap has interrupted the first
    child=
    return $status
}

rm -rf "$run_dir/status" && mkdir "$run_dir/status"
trap 'stop=1; kill "${pids[@]}" 2> /dev/null' INT TERM HUP
for index in "${!hosts[@]}"; do
    agent "$index" "$@" < /dev/null &
    pids+=($!)
done
[ -z "$stop" ] || kill "${pids[@]}"
while ! wait; do :; done
# The least status of all hosts is that of the run: hosts that are lost have 75 or above 128.
status=$(cat "$run_dir"/status/* 2> /dev/null | sort -n | head -n 1)
exit "${status:-143}"
