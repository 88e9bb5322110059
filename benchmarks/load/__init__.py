"""The load generator's parts (benchmarks/serve.py is its command): requests, schedules, arms, figures.

http.py      a lean HTTP/1.1 client for streams: one process keeps up with 256 of them
request.py   one request: its body, its events, what is measured of it
work.py      what is asked: prompts, lengths, seeds, arrival times
loops.py     closed and open loop, one turn of an arm
arms.py      what is compared: stacks of our own, other servers
figures.py   percentiles, goodput, ratios, the tables' rows
picture.py   throughput and latency over the load
"""
