package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

func watchCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use: "watch", Short: "Show live which node announces what, sessions, refusals and findings",
		Long: "Show a line for each change: addresses of Services and the nodes that announce them, why one is not " +
			"announced, sessions of BGPPeers, pools, drained nodes and what programs find on nodes. It goes on when the API " +
			"server is back. landfallctl status shows how it is now.",
		Example: "  landfallctl watch\n  landfallctl watch -n shop -o json | jq -r 'select(.what==\"owner\").to'",
		Args:    cobra.NoArgs,
	}
	namespace := o.addAllNamespaces(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runWatch(cmd.Context(), *o, namespace(), cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	o.addOutput(cmd, "json", "yaml")
	return cmd
}

func runWatch(ctx context.Context, o options, namespace string, stdout, stderr io.Writer) error {
	short, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if _, _, err := o.connect(short); err != nil {
		return err
	}
	client, err := kube.Connect(kube.Options{User: &o.user, UserAgent: "landfallctl",
		Log: slog.New(newConnection(stderr))})
	if err != nil {
		return err
	}
	w := &watcher{now: time.Now, poked: make(chan struct{}, 1), show: func(c change) error {
		return writeChange(stdout, o.output, c)
	}}
	follow(w, "Services", serviceChanges, func(changed func(lb.Key)) table[lb.Key, lb.Service] {
		return kube.ServicesIn(client, namespace, changed)
	}, lb.Key.Compare)
	follow(w, "IPAddressPools", poolChanges, func(changed func(string)) table[string, lb.Pool] {
		return kube.Pools(client, changed, changed)
	}, strings.Compare)
	follow(w, "BGPPeers", peerChanges, func(changed func(string)) table[string, lb.Peer] {
		return kube.BGPPeers(client, changed, changed)
	}, strings.Compare)
	follow(w, "Nodes", nodeChanges, func(changed func(string)) table[string, lb.Node] {
		return kube.Nodes(client, "", changed)
	}, strings.Compare)
	follow(w, "findings on Nodes", findingChanges, func(changed func(string)) table[string, kube.NodeFinding] {
		return kube.NodeFindings(client, changed)
	}, strings.Compare)
	client.OnSync(w.poke)
	w.begun = func(what string, n int) { fmt.Fprintf(stderr, "watching %d %s\n", n, what) }
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return client.Run(ctx) })
	group.Go(func() error { return w.run(ctx) })
	return group.Wait()
}

func writeChange(to io.Writer, format string, c change) error {
	line := c.Time.Format(time.TimeOnly) + "  " + c.String()
	switch format {
	case "json":
		out, err := json.Marshal(c)
		if err != nil {
			return err
		}
		line = string(out)
	case "yaml": // a document for each
		if _, err := io.WriteString(to, "---\n"); err != nil {
			return err
		}
		return write(to, format, c, "")
	}
	_, err := fmt.Fprintln(to, line)
	return err
}

// table is the picture of one kind.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Synced() bool
}

// watcher shows the changes of several kinds. What is there when the first list of a kind arrives
// is no change.
type watcher struct {
	now   func() time.Time
	show  func(change) error
	begun func(what string, n int)
	poked chan struct{}
	kinds []func() error // each shows what has changed of its kind since the last call
}

func (w *watcher) poke() {
	select {
	case w.poked <- struct{}{}:
	default:
	}
}

// run shows changes until ctx ends.
func (w *watcher) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil // the user has ended it
		case <-w.poked:
		}
		for _, kind := range w.kinds {
			if err := kind(); err != nil {
				return err
			}
		}
	}
}

// follow adds a kind to a watcher.
func follow[K comparable, V any](w *watcher, what string, compare func(key K, before, now V) []change,
	watch func(changed func(K)) table[K, V], order func(a, b K) int) {
	var mu sync.Mutex
	changed := map[K]bool{}
	source := watch(func(key K) {
		mu.Lock()
		changed[key] = true
		mu.Unlock()
		w.poke()
	})
	var seen map[K]V
	w.kinds = append(w.kinds, func() error {
		mu.Lock()
		keys := make([]K, 0, len(changed))
		for key := range changed {
			keys = append(keys, key)
		}
		clear(changed)
		mu.Unlock()
		if seen == nil {
			if !source.Synced() {
				return nil // OnSync pokes again
			}
			seen = source.All()
			w.begun(what, len(seen))
			return nil
		}
		slices.SortFunc(keys, order)
		for _, key := range keys {
			now, ok := source.Get(key)
			for _, c := range compare(key, seen[key], now) {
				c.Time = w.now()
				if err := w.show(c); err != nil {
					return err
				}
			}
			if seen[key] = now; !ok {
				delete(seen, key)
			}
		}
		return nil
	})
}
