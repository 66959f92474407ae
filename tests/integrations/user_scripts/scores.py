"""A module of the scripts' own, with metrics that remember in its globals what they found."""

BEST = {"value": None, "history": []}
calls = 0


def compute_metrics(p):
    global calls
    calls += 1
    value = round(float(p.predictions.argmax(-1).mean()), 6)
    BEST["history"].append(value)
    BEST["value"] = max(value, BEST["value"] or 0.0)
    return {"mean": value, "best": BEST["value"], "calls": calls}
