import torch, time
from holdfast.kernels.triton_products import squared_products, _kernel
from holdfast.kernels.products import plain_squared_products

torch.manual_seed(0)


def t(f, n=10):
    f()
    torch.cuda.synchronize()
    ts = []
    for _ in range(n):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        f()
        b.record()
        torch.cuda.synchronize()
        ts.append(a.elapsed_time(b))
    return sorted(ts)[n // 2]


for B, T, M, N, dt in [
    (16, 512, 768, 768, torch.bfloat16),
    (16, 512, 2304, 768, torch.bfloat16),
    (16, 512, 3072, 768, torch.bfloat16),
    (16, 512, 768, 3072, torch.bfloat16),
    (16, 512, 50257, 768, torch.bfloat16),
    (5, 33, 100, 70, torch.float32),
]:
    l = torch.randn(B, T, M, device="cuda", dtype=dt)
    r = torch.randn(B, T, N, device="cuda", dtype=dt)
    tot = torch.zeros(M, N, device="cuda")
    squared_products(tot, l, r)
    ref = torch.zeros(1, M, N, device="cuda", dtype=torch.float64 if M < 1000 else torch.float32)
    plain_squared_products(ref, l.unsqueeze(1), r.unsqueeze(1))
    e = float((tot - ref[0]).norm() / ref.norm())
    mm = t(lambda: l.flatten(0, 1).T @ r.flatten(0, 1))
    k = t(lambda: squared_products(tot, l, r))

    def chunk():
        for i in range(0, B, 4 if M < 10000 else 1):
            g = torch.bmm(l[i : i + 4].mT, r[i : i + 4]) if M < 10000 else torch.bmm(l[i : i + 1].mT, r[i : i + 1])
            tot.add_(g.float().square_().sum(0))

    c = t(chunk)
    fl = 2 * B * T * M * N
    print(
        (B, T, M, N, dt),
        "err %.1e" % e,
        "weight-grad mm %.3f ms (%.0f TF)" % (mm, fl / mm / 1e9),
        "kernel %.3f ms (%.0f TF)" % (k, fl / k / 1e9),
        "bmm %.3f" % c,
        _kernel.best_config,
    )
