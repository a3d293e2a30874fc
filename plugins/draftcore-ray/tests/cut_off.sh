# A Ray cluster of two machines, each with a network of its own and a cable between them; a run whose
# processes are on the second; and once the file `cut` is here, a third machine, and no cable any more.
# Arguments: a Python, the run's folder, the command of the run.
set -e
python=$1 folder=$2
shift 2
cd "$folder"
trap 'kill $(jobs -p)' EXIT
start() { exec "$python" -m ray.scripts.scripts start --node-ip-address "$@" --num-cpus 4 --block; }
export RAY_AUTH_MODE=disabled # nobody else is in these networks
room='{"train": 2, "capture": 1}'
ip link set lo up
ip link add head type veth peer name node
ip address add 10.77.0.1/24 dev head
ip link set head up
start 10.77.0.1 --head --port 6399 --include-dashboard false >head.log 2>&1 &
mkfifo plugged
FAULTS=pace:1 unshare --net bash -c "$(declare -f start); python=$python
    read < plugged
    ip link set lo up
    ip address add 10.77.0.2/24 dev node
    ip link set node up
    until (echo > /dev/tcp/10.77.0.1/6399) 2> /dev/null; do sleep 0.2; done
    start 10.77.0.2 --address 10.77.0.1:6399 --resources '$room'" >node.log 2>&1 &
sleep 1
ip link set node netns $!
echo >plugged
until (echo >/dev/tcp/10.77.0.1/6399) 2>/dev/null; do sleep 0.2; done
"$@" >output.log 2>&1 &
run=$!
until [ -e cut ]; do sleep 0.1; done
start 10.77.0.1 --address 10.77.0.1:6399 --resources "$room" >spare.log 2>&1 &
ip link set head down
wait $run
