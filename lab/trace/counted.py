"""Steps rebuilt from a server's own counts, for an answer of which nothing else is known.

vLLM's `--per-request-spec-decode-metrics detailed` tells how many tokens each verify step drafted and accepted. With the ids of the answer
that fixes which of its tokens were drafted and accepted and which are the target's own: the first token comes from prefill, and each verify
step adds its accepted tokens and one more. What it does not tell: which tokens were rejected (`UNKNOWN` stands for each) and when.

A step without a draft is in no count, so the counts fit the answer exactly only where every step had one. Where they do not, nothing is
rebuilt: a wrong colour would be worse than none.
"""

from __future__ import annotations

import msgspec

from lab.trace.model import Request, Step

#: Stands for a draft token that the server counted but did not name, and how it is shown.
UNKNOWN = -2
SHOWN = "?"
#: The `Step.request` of rebuilt steps, by which they are told from real ones.
NAME = "counted"

SAID = (
    "Coloured by the server's own counts for each step; which tokens the target rejected, and the times of steps, are known only with the"
    " lab's plugin."
)
UNFIT = "The server's counts do not account for every token of this answer (a step without a draft is in none), so nothing is coloured."


def rebuilt(request: Request) -> Request | None:
    """The request with steps rebuilt from `request.counted`; None where there are none, or where they do not fit the answer."""
    if request.steps or not request.counted or not request.ids:
        return None
    ids, place = request.ids, 1
    found = [_step(request, 0, "prefill", (), ids[:1], 1, 0)]
    for drafted, accepted in request.counted:
        if place >= len(ids) or not 0 <= accepted <= drafted or drafted == 0:
            return None
        own = ids[place : place + accepted + 1]
        sampled = (*own, *(UNKNOWN,) * (accepted + 1 - len(own)))
        draft = (*sampled[:accepted], *(UNKNOWN,) * (drafted - accepted))
        found.append(_step(request, len(found), "decode", draft, sampled, len(own), place))
        place += len(own)
    if place != len(ids):
        return None
    found[-1] = msgspec.structs.replace(found[-1], finish=request.finish)
    pieces = {**request.pieces, UNKNOWN: SHOWN.encode().hex()}
    return msgspec.structs.replace(request, steps=found, pieces=pieces)


def _step(request: Request, index: int, phase: str, draft: tuple[int, ...], sampled: tuple[int, ...], kept: int, place: int) -> Step:
    prompt = request.usage_prompt or len(request.prompt_ids)
    return Step(
        trace=request.trace,
        request=NAME,
        index=index,
        phase="prefill" if phase == "prefill" else "decode",
        started=0.0,
        ended=0.0,
        draft=draft,
        sampled=sampled,
        kept=kept,
        context=prompt + place - 1 if place else 0,
        scheduled=len(draft) + 1 if place else prompt,
    )
