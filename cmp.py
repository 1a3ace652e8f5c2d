import sys
from pathlib import Path
from tests.session.outcome import Outcome
r=Path(sys.argv[1]); ref=Outcome.of(r/'ref')
for c in sorted(r.glob('c*')):
    o=Outcome.of(c); d=sorted(k for k in o.losses if o.losses[k]!=ref.losses[k]); m=sorted(set(ref.losses)-set(o.losses))
    print(c.name,'differ',[(s,r) for r,s in d][:6] and sorted((s,r) for r,s in d)[:8],len(d),'missing',m,'digests equal',o.digests==ref.digests, o.digests.keys())
