package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// How the stories' clients behave.
const (
	longLived = 20 // connections to each Service from each client
	newEvery  = 25 * time.Millisecond
)

// load is long-lived connections and new ones, from one client to one Service.
type load struct {
	host   string
	to     Web
	long   int // how many are long-lived
	probe  *lab.Probe
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu   sync.Mutex
	lost []loss
}

// Outcome is what became of connections.
type Outcome struct {
	Long, Broken int // long-lived ones
	New, Failed  int // new ones
	// NotJudged are connections of both kinds that timed out while the control client's did too, for
	// Unjudged of the Watched time, over all clients: see [control].
	NotJudged         int
	Unjudged, Watched time.Duration
	Why               []string

	lost []loss // Broken and Failed, one by one
}

// loss is a connection from a host that was lost.
type loss struct {
	lab.Loss
	host, to string
	long     bool // a long-lived one
}

// String says which it was, to be looked for in captures and logs.
func (l loss) String() string {
	const clock = "15:04:05.000"
	return fmt.Sprintf("%s to %s, %s to %s: %s", l.Began.Format(clock), l.Ended.Format(clock), l.host, l.to, l.Why)
}

// Add adds another outcome.
func (o *Outcome) Add(other Outcome) {
	o.Long += other.Long
	o.Broken += other.Broken
	o.New += other.New
	o.Failed += other.Failed
	o.NotJudged += other.NotJudged
	o.Unjudged += other.Unjudged
	o.Watched += other.Watched
	o.Why = append(o.Why, other.Why...)
	o.lost = append(o.lost, other.lost...)
}

// String says it in a line.
func (o Outcome) String() string {
	text := fmt.Sprintf("%d of %d long-lived connections broken, %d of %d new ones failed", o.Broken, o.Long, o.Failed,
		o.New)
	if o.Unjudged > 0 {
		text += fmt.Sprintf("; %.1f of %.0f s are not judged, with %d connections that timed out",
			o.Unjudged.Seconds(), o.Watched.Seconds(), o.NotJudged)
	}
	return text
}

// Details returns what is known of the lost connections, and one by one the first of those that are judged.
func (o Outcome) Details() []string {
	all := slices.Clone(o.Why)
	for _, l := range o.lost[:min(len(o.lost), 20)] {
		all = append(all, l.String())
	}
	return all
}

// Err returns an error if connections were lost, or if too much could not be judged.
func (o Outcome) Err() error {
	switch {
	case o.Broken+o.Failed > 0:
		return errors.New(strings.Join(append([]string{o.String()}, o.Details()...), "\n"))
	case o.Unjudged.Seconds() > maxUnjudged*o.Watched.Seconds():
		return fmt.Errorf("this machine was too busy to tell (at most %.0f %% of the time may be without a judgement): %s",
			100*maxUnjudged, o)
	}
	return nil
}

// startLoad opens so many long-lived connections, and new ones. It fails if one of the first cannot be opened.
func (c *Cluster) startLoad(ctx context.Context, host string, to Web, long int) (*load, error) {
	ctx, cancel := context.WithCancel(ctx)
	l := &load{host: host, to: to, long: long, cancel: cancel}
	for i := range long {
		conn, err := c.Dial(ctx, host, "tcp", to.Target().String())
		if err != nil {
			cancel()
			l.group.Wait()
			return nil, fmt.Errorf("long-lived connection %d of %s to %s: %w", i, host, to.Name, err)
		}
		l.group.Go(func() {
			defer conn.Close()
			if err := lab.Talk(ctx, conn); err != nil {
				now := time.Now()
				l.mu.Lock()
				defer l.mu.Unlock()
				l.lost = append(l.lost, loss{host: host, to: to.Name, long: true, Loss: lab.Loss{
					Began: now.Add(-lab.LineTimeout), Ended: now, TimedOut: lab.TimedOut(err), Why: "long-lived: " + err.Error()}})
			}
		})
	}
	l.probe = c.StartProbe(ctx, host, "tcp", to.Target(), newEvery)
	return l, nil
}

// stop ends the connections and says what became of them.
func (l *load) stop() Outcome {
	report := l.probe.Stop()
	l.cancel()
	l.group.Wait()
	o := Outcome{Long: l.long, Broken: len(l.lost), New: report.Sent, Failed: report.Failed(), lost: l.lost}
	for _, one := range report.Lost {
		o.lost = append(o.lost, loss{host: l.host, to: l.to.Name, Loss: one})
	}
	if o.Failed > 0 {
		o.Why = append(o.Why, fmt.Sprintf("%s to %s: %s", l.host, l.to.Name, report))
	}
	return o
}

// loads are several, of which each has another client or Service.
type loads []*load

// startLoads opens connections from each client to each Service.
func (c *Cluster) startLoads(ctx context.Context, long int, hosts []string, to ...Web) (loads, error) {
	var all loads
	for _, host := range hosts {
		for _, w := range to {
			l, err := c.startLoad(ctx, host, w, long)
			if err != nil {
				all.stop()
				return nil, err
			}
			all = append(all, l)
		}
	}
	return all, nil
}

func (all loads) stop() Outcome {
	var o Outcome
	for _, l := range all {
		o.Add(l.stop())
	}
	return o
}

// owner returns the node whose MAC address the client on the LAN has for an address.
func (c *Cluster) owner(ctx context.Context, addr netip.Addr) (string, error) {
	type entry struct {
		MAC     string `json:"lladdr"`
		Address string `json:"address"`
	}
	read := func(host string, argv ...string) ([]entry, error) {
		out, err := c.Exec(ctx, host, append([]string{"ip", "-json"}, argv...)...)
		if err != nil {
			return nil, err
		}
		var entries []entry
		return entries, json.Unmarshal([]byte(out), &entries)
	}
	neighbors, err := read(lab.ClientName, "neigh", "show", "to", addr.String())
	if err != nil {
		return "", err
	}
	if len(neighbors) == 0 {
		return "", fmt.Errorf("the client knows no MAC address of %s", addr)
	}
	for _, n := range c.nodes {
		links, err := read(n.Name, "link", "show", "eth0")
		if err != nil {
			return "", err
		}
		if len(links) > 0 && links[0].Address == neighbors[0].MAC {
			return n.Name, nil
		}
	}
	return "", fmt.Errorf("%s has the MAC address %q, and no node has that one", addr, neighbors[0].MAC)
}

// routed waits until the router sends packets for an address to exactly these nodes.
func (c *Cluster) routed(ctx context.Context, addr netip.Addr, nodes ...string) error {
	want := strings.Join(nodes, " ")
	return lab.WaitFor(ctx, c.options.Progress, fmt.Sprintf("a route of %s to %s", addr, want), 2*time.Minute,
		func(ctx context.Context) error {
			got, err := c.Routers()[0].Nodes(ctx, netip.PrefixFrom(addr, addr.BitLen()))
			if err == nil && strings.Join(got, " ") != want {
				err = errors.New("it goes to " + strings.Join(got, " "))
			}
			return err
		})
}
