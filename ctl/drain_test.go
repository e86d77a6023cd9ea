package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestDrainWaits ends when nothing has been left twice in a row, when it cannot be known, or when
// time is up.
func TestDrainWaits(t *testing.T) {
	busy := drainState{Answering: 2, Connections: 3}
	quiet, unknown, denied := drainState{}, drainState{Unknown: "no answer"}, drainState{Unknown: "forbidden", Denied: true}
	for name, test := range map[string]struct {
		states []drainState // the last one stays
		asked  int
		done   bool
		err    error
	}{
		"at once":          {[]drainState{quiet}, 2, true, nil},
		"after a while":    {[]drainState{busy, busy, {Connections: 1}, quiet}, 5, true, nil},
		"one more came":    {[]drainState{quiet, busy, quiet}, 4, true, nil},
		"did not answer":   {[]drainState{unknown, quiet}, 3, true, nil},
		"may not be asked": {[]drainState{denied}, 1, false, nil},
		"routes":           {[]drainState{{Routes: 1}}, 10, false, errTimeout},
		"a router is away": {[]drainState{{Leaving: 1}}, 10, false, errTimeout},
		"never":            {[]drainState{busy}, 10, false, errTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			asked := 0
			d := drainer{now: time.Now, show: func(string, string, time.Duration) {}, wait: func(ctx context.Context) error {
				if asked == 10 {
					cancel(errTimeout)
				}
				return context.Cause(ctx)
			}, ask: func(context.Context) drainState {
				asked++
				return test.states[min(asked, len(test.states))-1]
			}}
			last, err := d.run(ctx)
			if asked != test.asked || last.Done != test.done || !errors.Is(err, test.err) {
				t.Errorf("asked %d times, %+v, error %v", asked, last, err)
			}
		})
	}
}

// TestDrainSaysWhatHasNoOtherNode says so once, ahead of a wait that may be long, and again at its end.
func TestDrainSaysWhatHasNoOtherNode(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	alone := explain.Parting{Count: 2, Services: []string{"shop/web", "shop/dns"}}
	states, asked := []drainState{{Answering: 2}, {Routes: 2, Parting: alone}, {Routes: 2, Parting: alone}}, 0
	var said []explain.Parting
	d := drainer{now: time.Now, show: func(string, string, time.Duration) {},
		tell: func(p explain.Parting) { said = append(said, p) },
		wait: func(context.Context) error { return nil },
		ask: func(context.Context) drainState {
			if asked++; asked > len(states) {
				cancel(errTimeout)
				return drainState{}
			}
			return states[asked-1]
		}}
	last, _ := d.run(ctx)
	const want = "no other node announces 2 addresses, of Services shop/web, shop/dns: n1 goes on until one does; " +
		"kubectl drain n1 --ignore-daemonsets moves their pods"
	if len(said) != 1 || partingText("n1", said[0]) != want || !strings.Contains(last.text("n1"), want) {
		t.Errorf("said %+v, at the end %s", said, last.text("n1"))
	}
}

// TestDrainInterrupted keeps the last answer when a question is cut short.
func TestDrainInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	asked := 0
	d := drainer{now: time.Now, show: func(string, string, time.Duration) {},
		wait: func(context.Context) error { return nil },
		ask: func(context.Context) drainState {
			if asked++; asked == 2 {
				cancel(errTimeout)
				return drainState{Unknown: "context canceled"}
			}
			return drainState{Connections: 7}
		}}
	if last, err := d.run(ctx); last.Connections != 7 || last.Unknown != "" || !errors.Is(err, errTimeout) {
		t.Errorf("%+v %v", last, err)
	}
}

// TestDrainWithoutAnswer says that nothing is known when time is up before the first answer.
func TestDrainWithoutAnswer(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	d := drainer{now: time.Now, ask: func(context.Context) drainState {
		cancel(errTimeout)
		return drainState{}
	}}
	last, err := d.run(ctx)
	if outcome := last.outcome("n1"); last.Unknown == "" || !errors.Is(err, errTimeout) || outcome == nil ||
		errors.Is(outcome, errWrong) {
		t.Errorf("%+v %v, exit code of %v", last, err, outcome)
	}
}

func TestDrainable(t *testing.T) {
	node := func(name string, change ...func(*explain.Node)) explain.Node {
		n := explain.Node{Node: lb.Node{Name: name}, Ready: true}
		for _, f := range change {
			f(&n)
		}
		return n
	}
	runs := explain.Agent{Speaker: explain.Program{There: true, Running: true}}
	excluded := func(n *explain.Node) {
		n.Labels = labels.Set{"node.kubernetes.io/exclude-from-external-load-balancers": ""}
	}
	for name, test := range map[string]struct {
		other  explain.Node
		change func(*explain.Cluster)
		node   string
		want   string // in the error, "" for none
	}{
		"another announces": {other: node("n2"), node: "n1"},
		"there is none":     {other: node("n2"), node: "n9", want: "there is no Node n9"},
		"not ready":         {other: node("n2", func(n *explain.Node) { n.Ready = false }), node: "n1", want: "--force"},
		"drained": {other: node("n2", func(n *explain.Node) { n.Leaving = lb.ReasonNodeDrained }), node: "n1",
			want: "--force"},
		"excluded": {other: node("n2", excluded), node: "n1", want: "--force"},
		"excluded, which does not matter": {other: node("n2", excluded), node: "n1",
			change: func(c *explain.Cluster) { c.IgnoreExclude = true }},
		"no speaker elsewhere": {other: node("n2"), node: "n1", change: func(c *explain.Cluster) { delete(c.Agents, "n2") },
			want: "--force"},
		"no speaker here": {other: node("n2"), node: "n1", change: func(c *explain.Cluster) {
			c.Agents = map[string]explain.Agent{}
		}},
		"not readable": {other: node("n2"), node: "n1", change: func(c *explain.Cluster) {
			c.Unread = []explain.Unread{{What: "pods", Why: "you may not list pods", Grant: "the rule"}}
		}, want: "you may not list pods"},
	} {
		c := explain.Cluster{Nodes: map[string]explain.Node{"n1": node("n1"), "n2": test.other},
			Agents: map[string]explain.Agent{"n1": runs, "n2": runs}}
		if test.change != nil {
			test.change(&c)
		}
		if err := drainable(c, test.node); (err != nil) != (test.want != "") ||
			err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", name, err, test.want)
		}
	}
}

// TestDrainState reads what is left from the programs of the node alone, and says what it cannot.
func TestDrainState(t *testing.T) {
	const speaker = `{"answering":2,"parting":{"count":1,"services":["shop/web"]},"bgp":{"peers":[{"name":"tor","session":{"prefixes":3}},{"name":"new"}]},"vips":[]}`
	const proxy = `{"node":"n0","total":4,"services":[{"service":"shop/web","count":4,"clients":[{"address":"192.0.2.7","count":4}]}]}`
	const old = `{"node":"n0","services":[]}`
	for name, test := range map[string]struct {
		speaker, proxy string
		want           drainState
	}{
		"both": {speaker, proxy, drainState{Answering: 2, Routes: 3, Connections: 4,
			Parting: explain.Parting{Count: 1, Services: []string{"shop/web"}}}},
		"a router is away": {`{"answering":0,"bgp":{"leaving":2,"peers":[{"name":"tor","session":{"prefixes":0}}]}}`,
			`{"total":0}`, drainState{Leaving: 2}},
		"quiet":     {`{"answering":0}`, `{"total":0}`, drainState{}},
		"old proxy": {`{"answering":0}`, old, drainState{Unknown: "the proxy does not say what is left: it is of an older version"}},
		"old speaker": {old, `{"total":0}`,
			drainState{Unknown: "the speaker does not say what is left: it is of an older version"}},
		"no exec": {"", "", drainState{Unknown: "the proxy does not say what is left: ", Denied: true}},
	} {
		t.Run(name, func(t *testing.T) {
			g := fakeWell(2).connected(t, &agents{})
			g.exec = func(_ context.Context, pod lb.Key, container string, command ...string) ([]byte, error) {
				want := map[string]string{"speaker": "--status-only=-", "proxy": "--status-only=connections"}[container]
				if pod.Name != "landfall-node-0" || command[2] != want {
					t.Errorf("asked %s %s: %q", pod, container, command)
				}
				said := map[string]string{"speaker": test.speaker, "proxy": test.proxy}[container]
				if said == "" {
					return nil, &kube.Denied{Verb: "create", Resource: "pods/exec", Err: errors.New("forbidden")}
				}
				return []byte(said), nil
			}
			if err := g.read(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := g.drainState(t.Context(), "n0")
			if got.Answering != test.want.Answering || got.Routes != test.want.Routes || got.Denied != test.want.Denied ||
				got.Leaving != test.want.Leaving ||
				!reflect.DeepEqual(got.Parting, test.want.Parting) ||
				got.Connections != test.want.Connections || !strings.HasPrefix(got.Unknown, test.want.Unknown) ||
				(got.Unknown == "") != (test.want.Unknown == "") {
				t.Errorf("%+v, want %+v", got, test.want)
			}
			if name == "both" && !strings.Contains(got.text("n0"), "Service shop/web: 4 connections (192.0.2.7: 4)") {
				t.Error(got.text("n0"))
			}
		})
	}
}

// A node is not drained because its pod is missing at one look: the pod is replaced, and its successor still has
// the connections.
func TestDrainWaitsForThePodThatIsReplaced(t *testing.T) {
	f := fakeWell(2)
	whole := f.objects[podsPath]
	without := `{"items":[` + whole[strings.Index(whole, `,{"metadata":{"name":"landfall-node-1"`)+1:]
	g := f.connected(t, &agents{})
	g.exec = func(_ context.Context, _ lb.Key, container string, _ ...string) ([]byte, error) {
		switch {
		case f.objects[podsPath] != whole:
			return nil, errors.New("pod landfall-node-0 is not found")
		case container == "proxy":
			return []byte(`{"total":4}`), nil
		}
		return []byte(`{"answering":0}`), nil
	}
	if err := g.read(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		pods        string
		connections int
		unknown     string // in the state
	}{
		{whole, 4, ""}, {without, 0, "not found"}, {without, 0, "it is not there"}, {without, 0, "it is not there"},
		{whole, 4, ""},
	} {
		f.objects[podsPath] = want.pods
		if got := g.drainState(t.Context(), "n0"); got.Connections != want.connections ||
			(got.Unknown == "") != (want.unknown == "") || !strings.Contains(got.Unknown, want.unknown) {
			t.Errorf("look %d: %+v, want %+v", i, got, want)
		}
	}
}

// At the first look a program may be missing because it is never to run on the node, which its DaemonSet tells.
func TestDrainOfANodeWithoutAProgram(t *testing.T) {
	const both = `{"name":"speaker","command":["landfall-speaker"]},
			{"name":"proxy","command":["landfall-proxy"]}`
	const proxy = `{"name":"proxy","command":["landfall-proxy"]}`
	const sets = "/apis/apps/v1/namespaces/landfall-system/daemonsets"
	for name, test := range map[string]struct {
		containers string         // of the node that drains; "" for no pod
		wanted     map[string]int // pods by component
		refused    bool
		unknown    string
		waits      bool // another one of the pods waits for a node
	}{
		"it is replaced":               {"", map[string]int{"node": 2}, false, "the proxy does not say", false},
		"Landfall is not to run there": {"", map[string]int{"node": 1}, false, "", false},
		"its speaker is replaced":      {proxy, map[string]int{"speaker": 2, "proxy": 2}, false, "the speaker does not say", false},
		"it is to have no speaker":     {proxy, map[string]int{"speaker": 1, "proxy": 2}, false, "", false},
		"another pod waits for a node": {"", map[string]int{"node": 2}, false, "", true},
		"the user may not know":        {"", nil, true, "whether it is to come is not known", false},
	} {
		t.Run(name, func(t *testing.T) {
			f := fakeWell(2)
			whole := f.objects[podsPath]
			second := strings.Index(whole, `,{"metadata":{"name":"landfall-node-1"`)
			if test.containers == "" {
				f.objects[podsPath] = `{"items":[` + whole[second+1:]
				if test.waits {
					f.objects[podsPath] = strings.Replace(whole, `"nodeName":"n0",`, "", 1)
				}
			} else {
				f.objects[podsPath] = strings.Replace(whole[:second], both, test.containers, 1) + whole[second:]
			}
			for _, program := range []string{"speaker", "proxy"} {
				f.objects[sets+"?app.kubernetes.io/component in (node,"+program+")"] = fmt.Sprintf(
					`{"items":[{"status":{"desiredNumberScheduled":%d}}]}`, test.wanted[program]+test.wanted["node"])
			}
			f.refused[sets] = test.refused
			g := f.connected(t, &agents{})
			g.exec = func(context.Context, lb.Key, string, ...string) ([]byte, error) {
				return []byte(`{"answering":0,"total":0}`), nil
			}
			if err := g.read(t.Context()); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if got := g.drainState(t.Context(), "n0"); !strings.Contains(got.Unknown, test.unknown) ||
					(got.Unknown == "") != (test.unknown == "") || g.stale != (got.Unknown != "") {
					t.Errorf("%+v, want %q; the pods are read again: %v", got, test.unknown, g.stale)
				}
			}
		})
	}
}

// TestDrainLabels sets and removes the label, through the API server alone.
func TestDrainLabels(t *testing.T) {
	f := fakeWell(2)
	f.objects["/api/v1/nodes/n0"] = `{"metadata":{"name":"n0"}}`
	patches := make(chan string, 4)
	f.patched = func(path, body string) { patches <- path + " " + body }
	config := f.serve(t)
	for _, test := range []struct {
		args  []string
		code  int
		patch string
	}{
		{[]string{"drain", "n0", "--no-wait"}, 0, `{"metadata":{"labels":{"landfall.dev/drain":"true"}}}`},
		{[]string{"undrain", "n0"}, 0, `{"metadata":{"labels":{"landfall.dev/drain":null}}}`},
		{[]string{"drain", "n9", "--no-wait"}, 2, ""},
		{[]string{"undrain", "n9"}, 2, ""},
		{[]string{"undrain", "node/n0"}, 0, `{"metadata":{"labels":{"landfall.dev/drain":null}}}`},
	} {
		code, stdout, stderr := run(append(test.args, "--kubeconfig", config)...)
		if code != test.code {
			t.Errorf("%q: exit code %d: %s%s", test.args, code, stdout, stderr)
		}
		if test.patch != "" {
			if got := <-patches; got != "/api/v1/nodes/n0 "+test.patch {
				t.Errorf("%q: patched %s", test.args, got)
			}
		} else if !strings.Contains(stderr, "there is no Node n9") {
			t.Errorf("%q: %s", test.args, stderr)
		}
	}
	for _, test := range []struct{ args, want string }{
		{"undrain n0 -o yaml", "drain: false\nnode: n0\n"}, {"drain n0 --no-wait -o yaml", "drain: true\nnode: n0\n"}} {
		code, stdout, _ := run(append(strings.Fields(test.args), "--kubeconfig", config)...)
		if code != 0 || stdout != test.want {
			t.Errorf("%s: exit code %d: %q", test.args, code, stdout)
		}
	}
	var state drainState
	_, stdout, _ := run("drain", "n0", "-o", "json", "--timeout", "1ns", "--kubeconfig", config)
	if err := json.Unmarshal([]byte(stdout), &state); err != nil || state.Done || state.Node != "n0" {
		t.Errorf("%v: %s", err, stdout)
	}
}

func TestProgress(t *testing.T) {
	var out strings.Builder
	p := newProgress(&out)
	for _, s := range []drainState{{Answering: 1, Connections: 4}, {Answering: 1, Connections: 4}, {Connections: 1}, {}} {
		p.show(s.bar(4), s.summary(), 90*time.Second)
	}
	p.end()
	if want := "4 connections, 1 address announced, 1m30s\n1 connection, 1m30s\n0 connections, 1m30s\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
	for connections, want := range map[int]string{4: "[........................]", 3: "[######..................]",
		0: "[########################]"} {
		if got := (drainState{Connections: connections}).bar(4); got != want {
			t.Errorf("%d of 4: %s", connections, got)
		}
	}
	if got := (drainState{Answering: 1}).bar(0); got != "[#######################.]" {
		t.Errorf("addresses left: %s", got)
	}
}

// A program of the node that drains has its say in the progress, and perhaps somebody has taken over the node.
func TestProgressOfAHostileNode(t *testing.T) {
	for _, terminal := range []bool{true, false} {
		var out strings.Builder
		p := &progress{to: &out, terminal: terminal}
		p.show("[]", drainState{Unknown: "the proxy does not say what is left: \x1b]0;owned\a\r\nall drained\u202e"}.summary(), 0)
		if got := strings.TrimPrefix(out.String(), "\r\x1b[K"); strings.ContainsAny(got, "\x1b\a\r\u202e") ||
			strings.Count(got, "\n") != map[bool]int{true: 0, false: 1}[terminal] {
			t.Errorf("%q", got)
		}
	}
}
