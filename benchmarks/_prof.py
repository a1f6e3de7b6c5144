import sys, cProfile, pstats, time, torch
sys.path.insert(0,'benchmarks')
import curvature as C, holdfast
s=C.SETTINGS['gpt-large']; torch.manual_seed(0); m=s.make().cuda().eval(); b=[tuple(t.cuda() for t in s.batch()) for _ in range(30)]
def T(f):
    torch.cuda.synchronize(); t=time.perf_counter(); f(); torch.cuda.synchronize(); return time.perf_counter()-t
for _ in range(4): print("plain",T(lambda:C.plain(s,m,b)), "ours", T(lambda:C.ours('observed')(s,m,b)), "sampled", T(lambda:C.ours('sampled')(s,m,b)), "ours 1 batch", T(lambda:C.ours('observed')(s,m,b[:1])))
pr=cProfile.Profile(); pr.enable(); C.ours('observed')(s,m,b[:10]); torch.cuda.synchronize(); pr.disable()
pstats.Stats(pr).sort_stats('tottime').print_stats(30)
pstats.Stats(pr).sort_stats('cumtime').print_stats(30)
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CUDA]) as p:
    C.ours('observed')(s,m,b[:4]); torch.cuda.synchronize()
print(p.key_averages().table(sort_by="cuda_time_total",row_limit=25,max_name_column_width=70))
with profile(activities=[ProfilerActivity.CUDA]) as p:
    C.plain(s,m,b[:4]); torch.cuda.synchronize()
print(p.key_averages().table(sort_by="cuda_time_total",row_limit=8,max_name_column_width=70))
