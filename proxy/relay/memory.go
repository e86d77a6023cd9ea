package relay

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
)

// A connection whose reader does not read holds as much as the kernel's buffers have grown to, at most 36 MiB in each
// direction by the settings of Linux 6.18 (net.ipv4.tcp_rmem and tcp_wmem). The container's limit of memory counts that
// (cgroup v2), and the kernel kills a relay that comes to it, with the connections of all. So the relay resets some
// before.

// memoryEvery is how often the relay looks how much memory it has left.
const memoryEvery = 100 * time.Millisecond

// excess returns how much has to go once more than four fifths are used: what is above seven tenths.
func excess(used, limit uint64) uint64 {
	if limit == 0 || used <= limit/5*4 {
		return 0
	}
	return used - limit/10*7
}

// BoundGarbage has the collector of garbage run before the process itself comes to seven tenths of a limit; 0 for none.
// Else garbage takes the room of the kernel's buffers, and the relay resets connections for that: when a proxy that has
// restarted tells of all Services once more, the heap grows to twice what is needed.
func BoundGarbage(limit uint64) {
	if limit > 0 {
		debug.SetMemoryLimit(int64(min(limit, math.MaxInt64) / 10 * 7))
	}
}

// ownMemory reads the memory of the process' own control group, as a container sees it.
func ownMemory() (used, limit uint64) { return cgroupMemory("/sys/fs/cgroup") }

// cgroupMemory reads how much memory a control group has, and its limit, which is 0 also with cgroup v1, as that does
// not count sockets.
func cgroupMemory(folder string) (used, limit uint64) {
	read := func(name string) uint64 {
		text, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			return 0
		}
		n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64) // "max" is no limit
		return n
	}
	return read("memory.current"), read("memory.max")
}

// errMemory is why a connection is reset.
var errMemory = errors.New("the relay's memory is nearly used up, and this connection holds much of it")

// passing are the connections that are passed on. It is safe for concurrent use.
type passing struct {
	mu  sync.Mutex
	all map[*passed]bool
}

// passed is one of them.
type passed struct {
	*passage
	service *service
	// from, to and at are the addresses of the client, the frontend and the backend.
	from, to, at netip.AddrPort
	tried        []netip.AddrPort
	began        time.Time
	reset        func(error)
	// inherited is set if the sockets are a predecessor's, whose control group they count for.
	inherited bool

	counting sync.Mutex
	// sentCounted and receivedCounted are how many bytes the Service's counts have, or a predecessor's.
	sentCounted, receivedCounted uint64
}

// count counts the bytes that were passed on since it was last called.
func (p *passed) count() {
	p.counting.Lock()
	defer p.counting.Unlock()
	sent, received := p.out.moved.Load(), p.back.moved.Load()
	p.service.count(Counts{Sent: sent - p.sentCounted, Received: received - p.receivedCounted})
	p.sentCounted, p.receivedCounted = sent, received
}

func newPassing() *passing { return &passing{all: map[*passed]bool{}} }

func (p *passing) add(c *passed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all[c] = true
}

func (p *passing) remove(c *passed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, c)
}

func (p *passing) list() []*passed {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.all))
}

// holding is what a connection holds.
type holding struct {
	*passed
	bytes uint64
}

// most returns which connections to reset to make so much room: each time the one that holds most, of the Service whose
// connections together hold most, of the namespace whose Services do. It returns none if all together do not hold as
// much, as something else does then.
func most(all []holding, room uint64) (victims []*passed) {
	of, sums, namespaces, total := map[*service][]holding{}, map[*service]uint64{}, map[string]uint64{}, uint64(0)
	for _, h := range all {
		of[h.service] = append(of[h.service], h)
		sums[h.service] += h.bytes
		namespaces[h.service.key.Namespace] += h.bytes
		total += h.bytes
	}
	if total < room {
		return nil
	}
	for _, list := range of {
		slices.SortFunc(list, func(a, b holding) int { return cmp.Compare(b.bytes, a.bytes) })
	}
	for freed := uint64(0); freed < room; {
		namespace, held := "", uint64(0)
		for name, sum := range namespaces {
			if sum > held {
				namespace, held = name, sum
			}
		}
		var largest *service
		for s, sum := range sums {
			if s.key.Namespace == namespace && (largest == nil || sum > sums[largest]) {
				largest = s
			}
		}
		h := of[largest][0]
		victims, of[largest] = append(victims, h.passed), of[largest][1:]
		sums[largest] -= h.bytes
		namespaces[namespace] -= h.bytes
		freed += h.bytes
	}
	return victims
}

// watchMemory looks again and again how much memory is left, until ctx ends. While there is little, the rules lead
// connections straight to endpoints.
func (r *Relay) watchMemory(ctx context.Context) {
	failures := loop.Failures{Repeat: time.Minute}
	look := time.NewTicker(memoryEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			r.lookAtMemory(&failures)
		}
	}
}

func (r *Relay) lookAtMemory(failures *loop.Failures) {
	defer r.pulses.Begin()()
	beyond := excess(r.deps.Memory())
	if beyond == 0 {
		return
	}
	if victims := r.relieve(beyond); len(victims) > 0 {
		failures.Log(r.deps.Log, "resetting connections whose readers do not read", "", errMemory,
			"connections", len(victims), "service", victims[0].service.key)
	}
}

// relieve makes so much room, and returns which connections it has reset for that.
func (r *Relay) relieve(beyond uint64) (victims []*passed) {
	r.strained.Store(r.deps.Now().UnixNano())
	r.cross()
	var all []holding
	for _, c := range r.passing.list() {
		if !c.inherited { // to reset those gives this process no room
			all = append(all, holding{c, c.client.held() + c.backend.held()})
		}
	}
	victims = most(all, beyond)
	for _, c := range victims {
		c.service.count(Counts{Refused: 1})
		c.reset(errMemory)
	}
	return victims
}

// held returns how many bytes the kernel holds for the connection, received and sent together.
func (c *Conn) held() (n uint64) {
	_ = c.control(func(fd int) error {
		received, unsent := socketMemory(uintptr(fd))
		n = received + unsent
		return nil
	})
	return n
}
