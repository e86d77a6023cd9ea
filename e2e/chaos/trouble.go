package chaos

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

const (
	// A slow program runs for so long at a time, and stands still for so long.
	slowRuns, slowStands = 20 * time.Millisecond, 180 * time.Millisecond
	spoofEvery           = 100 * time.Millisecond
	// forgetEvery is how often clients forget the way to a node.
	forgetEvery = time.Second
	// restartEvery is how often a program is started that cannot start.
	restartEvery = 500 * time.Millisecond
	// noneLeft is a limit of descriptors below those that each program has open.
	noneLeft = 3
	// flooded Services are created and deleted by so many workers.
	flooded, floodWorkers = 24, 8
	// foreignElements are in a table that other software makes and removes foreignTimes.
	foreignElements, foreignTimes = 1500, 20
	deadPeerName                  = "dead"
)

// again does something, at once and then again and again for a while.
func again(while, every time.Duration, f func() error) error {
	for until := time.Now().Add(while); ; time.Sleep(every) {
		if err := f(); err != nil || time.Now().After(until) {
			return err
		}
	}
}

// slow stops a program for most of the time.
func (r *runner) slow(e deed, signal func(syscall.Signal) error) error {
	return again(e.For, slowRuns, func() error {
		err := signal(syscall.SIGSTOP)
		time.Sleep(slowStands)
		return errors.Join(err, signal(syscall.SIGCONT))
	})
}

// restoreEtcd keeps what etcd holds, waits, and puts it back. Whoever writes endpoints writes them anew.
func (r *runner) restoreEtcd(ctx context.Context, e deed) error {
	err := r.during(e, func() error { return r.lab.SnapshotEtcd(ctx) }, func() error { return r.lab.RestoreEtcd(ctx) })
	return errors.Join(err, try(ctx, "write the endpoints", r.lab.Resync))
}

// shiftClock sets the clock of a controller, or of all programs of a node.
func (r *runner) shiftClock(ctx context.Context, e deed) error {
	agents := r.agentsOf(e.Node)
	if e.Program != "" {
		agents = []*lab.Agent{r.agent(ctx, e.Event)}
	}
	shift := func(by time.Duration) (err error) {
		for _, a := range agents {
			err = errors.Join(err, a.ShiftClock(by))
		}
		return err
	}
	return r.during(e, func() error { return shift(e.By) }, func() error { return shift(0) })
}

// noDescriptors has a program run out of descriptors.
func (r *runner) noDescriptors(ctx context.Context, e deed) error {
	a := r.agent(ctx, e.Event)
	before, err := a.LimitFiles(noneLeft)
	if err != nil {
		return err
	}
	time.Sleep(e.For)
	return bore(a, "without descriptors", func() error {
		_, err := a.LimitFiles(before)
		return err
	})
}

// sufferer is a running program to which something is done.
type sufferer interface {
	Name() string
	Running() bool
	Start() error
}

// bore undoes what was done to a program, which must not have ended of it.
func bore(a sufferer, how string, undo func() error) error {
	if !a.Running() {
		return errors.Join(fmt.Errorf("%s ended %s", a.Name(), how), a.Start())
	}
	return undo()
}

// fullDisk kills a program, and starts it where it can make no file for as long as that lasts, as the kubelet would.
func (r *runner) fullDisk(ctx context.Context, e deed) error {
	a := r.agent(ctx, e.Event)
	if err := a.Kill(); err != nil {
		return err
	}
	err := again(e.For, restartEvery, func() error {
		if a.Running() {
			return nil
		}
		return a.StartOnFullDisk()
	})
	if a.Running() {
		err = errors.Join(err, a.Kill())
	}
	return errors.Join(err, a.Start())
}

// fillDisk has a running program find no room for another file, and what was there out of its sight.
func (r *runner) fillDisk(ctx context.Context, e deed) error {
	a := r.agent(ctx, e.Event)
	return r.during(e, func() error { return a.FillDisk(ctx) }, func() error {
		return bore(a, "on a full disk", func() error { return a.FreeDisk(ctx) })
	})
}

// forget has the client on the LAN and the router forget which node answers for addresses.
func (r *runner) forget(ctx context.Context, addrs []netip.Addr) (err error) {
	for _, host := range []string{lab.ClientName, r.lab.Routers()[0].Name} {
		for _, a := range addrs {
			_, failed := r.lab.Exec(ctx, host, "ip", "neigh", "flush", "to", a.String())
			err = errors.Join(err, failed)
		}
	}
	return err
}

// leave ends the programs of a node, and deletes its Node.
func (r *runner) leave(ctx context.Context, node string) error {
	err := r.each(node, (*lab.Agent).Stop)
	return errors.Join(err, try(ctx, "delete node "+node, func(ctx context.Context) error {
		if err := r.lab.RemoveNode(ctx, node); !apierrors.IsNotFound(err) {
			return err
		}
		return nil
	}))
}

// join undoes leave.
func (r *runner) join(ctx context.Context, node string) error {
	err := try(ctx, "create node "+node, func(ctx context.Context) error {
		err := r.lab.AddNode(ctx, node)
		if apierrors.IsAlreadyExists(err) { // half of it, of a try whose end was lost, or of an older state
			return errors.Join(err, r.lab.RemoveNode(ctx, node))
		}
		return err
	})
	return errors.Join(err, r.each(node, (*lab.Agent).Start))
}

// agentsOf returns the programs of a node, without a controller, which another fault may be about.
func (r *runner) agentsOf(node string) []*lab.Agent {
	var agents []*lab.Agent
	for _, program := range []string{"speaker", "relay", "proxy"} {
		if a := r.lab.Agent(program, node); a != nil {
			agents = append(agents, a)
		}
	}
	return agents
}

// each does something to all of them.
func (r *runner) each(node string, do func(*lab.Agent) error) (err error) {
	for _, a := range r.agentsOf(node) {
		err = errors.Join(err, do(a))
	}
	return err
}

var peerKind = schema.GroupVersionResource{Group: "landfall.dev", Version: "v1beta1", Resource: "bgppeers"}

// removePeers deletes BGPPeers.
func (r *runner) removePeers(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := try(ctx, "delete peer "+name, func(ctx context.Context) error {
			if err := r.lab.Dynamic().Resource(peerKind).Delete(ctx, name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
				return err
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// flood creates Services as fast as the API server takes them, and deletes them.
func (r *runner) flood(ctx context.Context, e deed) error {
	began := time.Now()
	err := eachOfFlood(e.Event, func(n int, name string) error {
		s := churnService(fmt.Sprintf("churn-%d", n)) // of each kind
		s.Name = name
		return r.create(ctx, s)
	})
	err = errors.Join(err, r.drain(ctx, e.Event))
	r.journal.add("flood: %d Services created and deleted in %v", flooded, time.Since(began).Round(time.Millisecond))
	return err
}

// drain deletes the Services of a flood.
func (r *runner) drain(ctx context.Context, e story.Event) error {
	return eachOfFlood(e, func(_ int, name string) error { return r.removeService(ctx, name) })
}

// redo does again what an etcd that was restored has undone of a round: ends of floods and of changes to pools and
// peers.
func (r *runner) redo(ctx context.Context, round story.Round) error {
	if !slices.ContainsFunc(round.Events, func(e story.Event) bool { return e.Kind == story.RestoreEtcd }) {
		return nil
	}
	err := errors.Join(r.removePeers(ctx, deadPeerName), try(ctx, "apply pools and peers", r.applyObjects))
	for _, e := range round.Events {
		if e.Kind == story.Flood {
			err = errors.Join(err, r.drain(ctx, e))
		}
	}
	return err
}

// applyObjects applies the pools and peers that are there whenever nothing happens.
func (r *runner) applyObjects(ctx context.Context) error {
	return r.lab.ApplyYAML(ctx, pools(false)+peers(r.lab.Cluster()))
}

// eachOfFlood does something with each of its Services, by number and name, some at once.
func eachOfFlood(e story.Event, do func(n int, name string) error) error {
	var next atomic.Int32
	var g lab.Group
	for range floodWorkers {
		g.Run(func() error {
			for n := int(next.Add(1)); n <= flooded; n = int(next.Add(1)) {
				if err := do(n, fmt.Sprintf("flood-%d-%d", e.ID, n)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// foreignTable is a table with many elements, as nft takes it.
func foreignTable() string {
	var elements []string
	addr := netip.MustParseAddr("198.18.0.1")
	for range foreignElements {
		elements = append(elements, addr.String())
		addr = addr.Next()
	}
	return "add table ip foreign; add set ip foreign s { type ipv4_addr; }; add element ip foreign s { " +
		strings.Join(elements, ", ") + " }"
}

// foreignRules makes that table and removes it. What a node misses of the kernel's notifications it must ask for.
var foreignRules = fmt.Sprintf(`for i in $(seq %d); do
	nft "$1" && nft delete table ip foreign || exit 1
done`, foreignTimes)

// foreignFlush empties all maps of Landfall's rules.
const foreignFlush = `nft list maps 2>/dev/null |
	awk '$1 == "table" { table = $2 " " $3 } $1 == "map" && table ~ / landfall/ { print "flush map " table " " $2 }' |
	nft -f -`

// deadPeer is a peer that does not answer: the host of a client.
func deadPeer(c lab.Cluster) string {
	return fmt.Sprintf(`
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: %s}
spec: {myASN: %d, peerASN: %d, peerAddress: "%s"}
`, deadPeerName, c.ToR.NodeASN, c.ToR.ASN+7, c.LAN.Client)
}
