#!/bin/sh
# Two processes in two network namespaces, with a link of a given rate between them (needs root, ip and tc).
#   sh benchmarks/narrow_link.sh 2gbit python benchmarks/bench_overlap.py --link --share 0.75
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
  ip -n fpipe-$side link set fpipe-v$side up
  ip -n fpipe-$side link set lo up
  ip netns exec fpipe-$side tc qdisc add dev fpipe-v$side root tbf rate "$rate" burst 64kb latency 400ms
done
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29501 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0
RANK=1 GLOO_SOCKET_IFNAME=fpipe-vb ip netns exec fpipe-b "$@" &
RANK=0 GLOO_SOCKET_IFNAME=fpipe-va ip netns exec fpipe-a "$@"
wait
