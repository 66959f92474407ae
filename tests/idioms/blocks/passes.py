"""Forward and backward of composed scripts, and the order of their writes: lines by shape."""

from tests.idioms.blocks.extras import CARRIED, DRAWS
from tests.idioms.blocks.plan import GANS, Plan
from tests.idioms.blocks.updates import update, zero_gradients


def is_manual(plan: Plan) -> bool:
    """Return whether the script averages gradients itself."""
    return plan["wrapper"].startswith("manual")


def step_body(plan: Plan) -> list[str]:
    """From the first forward pass to the last write."""
    shape = plan["shape"]
    if shape not in (*GANS, "actor-critic"):
        return [*_zero(plan, first=True), *update(plan, _supervised(plan)), *_zero(plan, first=False)]
    middle = ['here(job, step, "middle")', *_middle(plan)]
    if shape == "actor-critic":
        return [*_actor(plan), *middle, *_second_write(plan, "F.mse_loss(expected, reward)"), *zero_gradients(plan)]
    critic, generator = _critic(plan), _generator(plan)
    wait = ["other_optimizer.zero_grad()", *zero_gradients(plan)]
    if shape == "gan":
        return [*critic, *middle, *generator, *wait]
    if shape == "gan-reversed":
        return [*generator, *middle, *critic, *wait]
    if shape == "n-critic":
        return ["for _ in range(2):", *_in(critic), *middle, *generator, *wait]
    start = ["loss = torch.zeros(())"]
    if shape == "alternate":
        return [*start, "if step.number % 2 == 0:", *_in(critic), "else:", *_in(generator), *middle, *wait]
    if shape == "rare-generator":
        return [*critic, *middle, "if step.number % 3 == 2:", *_in(generator), *wait]
    return [
        *start,
        *("z = torch.randn(8, 6)", "other_optimizer.zero_grad()", "F.mse_loss(other(z), x).backward()"),
        *_average(plan, "other_net"),
        "other_optimizer.step()",
        *middle,
        "if step.number >= 4:",
        *_in(critic),
        *wait,
    ]


def _supervised(plan: Plan) -> list[str]:
    """Forward and backward of a step with a label for each example."""
    shape = plan["shape"]
    if shape == "maml":
        lines = [
            "weights = {name: p for name, p in net.named_parameters() if p.requires_grad}",
            "inner = F.cross_entropy(torch.func.functional_call(net, weights, (x[:4],)), y[:4])",
            "slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)",
            "fast = {name: p - 0.1 * slope for (name, p), slope in zip(weights.items(), slopes)}",
            "logits = torch.func.functional_call(net, fast, (x[4:],))",
            "loss = F.cross_entropy(logits, y[4:])",
        ]
    elif plan["net"] == "rnn-carried":
        lines = ["logits, hidden = model(x, hidden)", "hidden = hidden.detach()", "loss = F.cross_entropy(logits, y)"]
    else:
        lines = ["logits = model(x)", "loss = F.cross_entropy(logits, y)"]
    if shape == "distill":
        lines += ["loss = loss + F.mse_loss(logits, teacher(x))"]
    if shape == "momentum":
        lines += ["with torch.no_grad():", "    wanted = key(x)", "loss = loss + F.mse_loss(logits, wanted)"]
    lines += _on_loss(plan)
    if plan["accumulate"] == "two":
        lines.append("loss = loss / 2")
    if plan["scaler"] == "overflow":
        lines += ["if step.number == 3:", '    loss = loss * float("inf")']
    lines += ['here(job, step, "forward")']
    lines.append("scaler.scale(loss).backward()" if plan["scaler"] != "none" else "loss.backward()")
    if plan["accumulate"] == "two":
        waits = "contextlib.nullcontext() if index else model.no_sync()"
        if is_manual(plan):
            lines = ["for x, y in batch:", *_in([*_unpack_each(plan), *lines])]
        else:
            lines = [
                "for index, (x, y) in enumerate(batch):",
                *_in([*_unpack_each(plan), f"with {waits}:", *_in(lines)]),
            ]
    lines += _average(plan, "net")
    if plan["scaler"] != "none" and (plan["clip"] != "none"):
        lines.append("scaler.unscale_(optimizer)")
        if plan["optimizer"] == "two-optimizers":
            lines.append("scaler.unscale_(vector_optimizer)")
    return [*lines, *_clip(plan)]


def on_input(plan: Plan) -> list[str]:
    """Lines of the script that change `x` before it computes on it."""
    lines = list(DRAWS[plan["draws"]][0]) if plan["draws"] != "none" else []
    if plan["carried"] != "none":
        lines += CARRIED[plan["carried"]].on_input
    return lines


def _unpack_each(plan: Plan) -> list[str]:
    """With accumulation the parts of a step are unpacked one by one."""
    if plan["data"] in ("list", "generator"):
        return ["x, y = x[job.rank :: job.world_size], y[job.rank :: job.world_size]", *on_input(plan)]
    return on_input(plan)


def _on_loss(plan: Plan) -> list[str]:
    lines = list(CARRIED[plan["carried"]].on_loss) if plan["carried"] != "none" else []
    if plan["per_rank"] != "none":
        lines.append("loss = loss / (1 + running.mean)")
    if plan["stateful"] != "none":
        lines.append("loss = loss / (1 + normalizer.mean)")
    return lines


def _average(plan: Plan, net: str) -> list[str]:
    return [f"average_gradients({net})"] if is_manual(plan) else []


def _clip(plan: Plan) -> list[str]:
    if plan["clip"] == "norm":
        return ["nn.utils.clip_grad_norm_(net.parameters(), 0.5)"]
    return ["nn.utils.clip_grad_value_(net.parameters(), 0.1)"] if plan["clip"] == "value" else []


def _zero(plan: Plan, *, first: bool) -> list[str]:
    """At the start of a step or at its end, as people do; what is repeated inside the update begins with zeros."""
    at_start = plan.seed % 3 == 0 or plan["optimizer"] in ("sam", "lbfgs", "closure")
    return zero_gradients(plan) if first == at_start else []


def _middle(plan: Plan) -> list[str]:
    if plan["middle"] == "none":
        return []
    return [
        "between = loss.detach().clone()",
        "work = dist.all_reduce(between, async_op=True)" if plan["middle"] == "async" else "dist.all_reduce(between)",
    ]


def _critic(plan: Plan) -> list[str]:
    passes = [
        "with torch.no_grad():",
        "    fake = other(torch.randn(8, 6))",
        "real, false = model(torch.cat([x, fake])).mean(1).chunk(2)",
        "loss = F.softplus(-real).mean() + F.softplus(false).mean()",
        *_on_loss(plan),
        'here(job, step, "forward")',
        *zero_gradients(plan),
        "loss.backward()",
        *_average(plan, "net"),
        *_clip(plan),
    ]
    return update(plan, passes)


def _generator(plan: Plan) -> list[str]:
    toggled = plan["flags"] == "toggle"
    judge = "net" if toggled else "model"
    loss = f"F.softplus(-{judge}(other(torch.randn(8, 6))).mean(1)).mean()"
    lines = ["other_optimizer.zero_grad()", *_second_write(plan, loss)]
    if plan["shape"] == "gan-reversed":
        lines.append("loss = other_loss")
    return ["net.requires_grad_(False)", *lines, "net.requires_grad_(True)"] if toggled else lines


def _actor(plan: Plan) -> list[str]:
    passes = [
        "expected = other(x)",
        "logits = model(x)",
        "reward = (logits.argmax(1) == y).float()",
        "advantage = 1 + (reward - expected).detach()",
        "loss = -(F.log_softmax(logits, 1).gather(1, y[:, None]).squeeze(1) * advantage).mean()",
        *_on_loss(plan),
        'here(job, step, "forward")',
        "loss.backward()",
        *_average(plan, "net"),
        *_clip(plan),
    ]
    return update(plan, passes)


def _second_write(plan: Plan, loss: str) -> list[str]:
    lines = [f"other_loss = {loss}", "other_loss.backward()", *_average(plan, "other_net")]
    if plan["middle"] == "async" and plan["shape"] == "actor-critic":
        lines.append("work.wait()")
    lines += ['here(job, step, "second-write")', "other_optimizer.step()"]
    return [*lines, *(["other_optimizer.zero_grad()"] if plan["shape"] == "actor-critic" else [])]


def _in(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else line for line in lines]
