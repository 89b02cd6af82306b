"""Runs in a Python that has SimGrid (Debian: python3-simgrid, for the system's Python), and imports nothing of ours.

Reads a JSON list of cases from stdin: ``{"links": {name: bytes/s}, "flows": [[path, bytes, start in s], …]}``, a path
being a list of link names. Writes a JSON list: for each case, when each flow ended (s).

Pure fluid: no latencies, no model of TCP, no weights. A SimGrid engine can exist once in a process, so each case has a
process of its own, forked from this one.
"""

from __future__ import annotations

import json
import multiprocessing
import sys

import simgrid

OPTIONS = {
    "network/model": "CM02",
    "network/optim": "Full",
    "network/TCP-gamma": "0",
    "network/crosstraffic": "0",
    "network/bandwidth-factor": "1",
    "network/latency-factor": "1",
    "network/weight-S": "0",
    "surf/precision": "1e-12",
    "maxmin/precision": "1e-9",
}


def ends(case):
    """When each flow of a case ended."""
    quiet = ["--log=root.thres:critical", "--log=xbt_cfg.thres:critical"]
    engine = simgrid.Engine(["ends", *quiet, *(f"--cfg={key}:{value}" for key, value in OPTIONS.items())])
    zone = simgrid.NetZone.create_full_zone("zone")
    links = {}
    for name, rate in case["links"].items():
        links[name] = zone.create_link(name, rate)
        links[name].set_latency(0.0)
        links[name].seal()
    ways = {}  # a pair of hosts for each path
    for path, _, _ in case["flows"]:
        if tuple(path) not in ways:
            pair = [zone.create_host(f"{end}{len(ways)}", 1e9).seal() for end in ("from", "to")]
            route = [simgrid.LinkInRoute(links[name]) for name in path]
            zone.add_route(pair[0].netpoint, pair[1].netpoint, None, None, route, False)
            ways[tuple(path)] = pair
    zone.seal()
    found = [None] * len(case["flows"])

    def send_all():
        under_way = []
        for number, (path, size, start) in sorted(enumerate(case["flows"]), key=lambda numbered: numbered[1][2]):
            if start > simgrid.Engine.clock:
                simgrid.this_actor.sleep_until(start)
            under_way.append((number, simgrid.Comm.sendto_async(*ways[tuple(path)], size)))
        for number, flow in under_way:
            flow.wait()
            found[number] = flow.finish_time

    simgrid.Actor.create("sender", next(iter(ways.values()))[0], send_all)
    engine.run()
    return found


def main():
    """All cases, each in its own process."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        json.dump(pool.map(ends, json.load(sys.stdin), chunksize=1), sys.stdout)


if __name__ == "__main__":
    main()
