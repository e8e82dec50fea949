#!/bin/sh
# Two processes in two network namespaces, with a link of a given rate between them (needs root, ip and tc).
#   sh benchmarks/narrow_link.sh 200mbit python -m benchmarks.bench_overlap --link --mb 1 --microbatches 24 --rounds 3
# Packets are large, since each one sets a timer, and tens of thousands of timers a second take time from the cores. What
# one exchange carries must be a multiple of the burst, or the rate is none.
set -e
rate=$1
shift
cleanup() {
  ip netns del fpipe-a 2>/dev/null || true
  ip netns del fpipe-b 2>/dev/null || true
}
trap cleanup EXIT
cleanup
ip netns add fpipe-a
ip netns add fpipe-b
ip link add fpipe-va netns fpipe-a type veth peer name fpipe-vb netns fpipe-b
for side in a b; do
  ip -n fpipe-$side addr add 10.77.0.$([ $side = a ] && echo 1 || echo 2)/24 dev fpipe-v$side
  ip -n fpipe-$side link set fpipe-v$side mtu 65000 up
  ip -n fpipe-$side link set lo up
  ip netns exec fpipe-$side tc qdisc add dev fpipe-v$side root tbf rate "$rate" burst 66000 latency 400ms
done
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29501 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0
RANK=1 GLOO_SOCKET_IFNAME=fpipe-vb ip netns exec fpipe-b "$@" &
RANK=0 GLOO_SOCKET_IFNAME=fpipe-va ip netns exec fpipe-a "$@"
wait
