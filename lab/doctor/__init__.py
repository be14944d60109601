"""The doctor: what will fail, what will be silently wrong and what needs care, said before anything is launched, or of a running server.

`subject.py` gathers what the rules look at (machine, command line, the target's and the draft's files), `rule.py` is the registry, each
`rules_*.py` holds rules, one a function, `server.py` asks a running server, and `report.py` puts the findings into words or JSON.
`blocks.py` and `kv.py` hold the arithmetic of the KV cache that rules and the page's barrier tab share. Everything here runs in the light
installation: no torch and no vLLM; only `vllm_blocks.py`, which is started as a process of its own, imports vLLM.
"""
