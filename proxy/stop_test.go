package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

func TestDecide(t *testing.T) {
	here, gone := presence{seen: true, there: true}, presence{seen: true}
	for name, test := range map[string]struct {
		watched presence
		answers []answer
		want    verdict
	}{
		"upgrade, rollback, restart, drain": {here, []answer{there, absent}, another},
		"not asked yet":                     {here, nil, unclear},
		"deleted":                           {gone, []answer{absent, absent}, last},
		"deleted, which the watch does not show yet":    {here, []answer{absent, absent}, last},
		"deleted in the foreground":                     {gone, []answer{deleting, absent}, last},
		"deleted with its roles, as by helm":            {gone, []answer{refused, refused}, last},
		"a role is taken away":                          {here, []answer{refused, refused}, unclear},
		"deleted without its pods":                      {presence{seen: true, orphaned: true}, []answer{absent, absent}, another},
		"being deleted without its pods":                {gone, []answer{orphaning, absent}, another},
		"created again":                                 {gone, []answer{there, absent}, another},
		"renamed by node.separatePods":                  {gone, []answer{absent, there}, another},
		"renamed, and the other one may not be read":    {gone, []answer{absent, refused}, last},
		"the API server is away":                        {gone, []answer{noAnswer, noAnswer}, unclear},
		"it goes away between two questions":            {gone, []answer{absent, noAnswer}, unclear},
		"another one is there, of what is known":        {gone, []answer{noAnswer, there}, another},
		"never seen, as with a wrong name":              {presence{}, []answer{absent, absent}, another},
		"never seen, and being deleted":                 {presence{}, []answer{deleting, absent}, another},
		"never seen, without a question":                {presence{}, nil, another},
		"deleted without its pods, without a question":  {presence{seen: true, orphaned: true}, nil, another},
		"the watch shows the deletion before the roles": {gone, []answer{deleting, deleting}, last},
	} {
		if got := decide(test.watched, test.answers); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

func TestPresence(t *testing.T) {
	type shown struct {
		set lb.DaemonSet
		ok  bool
	}
	here := shown{lb.DaemonSet{Stays: true, Ready: 3}, true}
	deleting, orphaning, none := shown{ok: true}, shown{lb.DaemonSet{Orphans: true}, true}, shown{}
	for name, test := range map[string]struct {
		shown []shown
		want  presence
	}{
		"nothing":                             {nil, presence{}},
		"none in the first list":              {[]shown{none}, presence{}},
		"there":                               {[]shown{here, here}, presence{seen: true, there: true}},
		"deleted":                             {[]shown{here, none}, presence{seen: true}},
		"deleted in the foreground":           {[]shown{here, deleting, none}, presence{seen: true}},
		"deleted without its pods":            {[]shown{here, orphaning, none}, presence{seen: true, orphaned: true}},
		"and created again":                   {[]shown{here, orphaning, none, here}, presence{seen: true, there: true}},
		"and deleted again":                   {[]shown{here, orphaning, none, here, none}, presence{seen: true}},
		"started while it was being deleted":  {[]shown{deleting, none}, presence{}},
		"started while it lost its pods":      {[]shown{orphaning, none}, presence{orphaned: true}},
		"first without, then with its pods":   {[]shown{here, orphaning, deleting, none}, presence{seen: true}},
		"first with, then without, its pods":  {[]shown{here, deleting, orphaning, none}, presence{seen: true, orphaned: true}},
		"created after the proxy has started": {[]shown{none, here}, presence{seen: true, there: true}},
	} {
		var got presence
		for _, s := range test.shown {
			got = got.next(s.set, s.ok)
		}
		if got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

func TestAnswerOf(t *testing.T) {
	sets := schema.GroupResource{Group: "apps", Resource: "daemonsets"}
	for _, test := range []struct {
		set   lb.DaemonSet
		found bool
		err   error
		want  answer
	}{
		{lb.DaemonSet{Stays: true}, true, nil, there},
		{lb.DaemonSet{}, true, nil, deleting},
		{lb.DaemonSet{Orphans: true}, true, nil, orphaning},
		{lb.DaemonSet{}, false, nil, absent},
		{lb.DaemonSet{}, false, apierrors.NewForbidden(sets, "x", nil), refused},
		{lb.DaemonSet{}, false, apierrors.NewUnauthorized(""), refused},
		{lb.DaemonSet{}, false, apierrors.NewServiceUnavailable(""), noAnswer},
		{lb.DaemonSet{}, false, errors.New("connection refused"), noAnswer},
	} {
		if got := answerOf(test.set, test.found, test.err); got != test.want {
			t.Errorf("%+v, %v, %v: %v, want %v", test.set, test.found, test.err, got, test.want)
		}
	}
}

// node is what a departure looks at: the API server's answers in turn, of which the last one stays,
// and a speaker.
type node struct {
	answers   []answer
	asked     int
	proxies   []int // others', in turn; negative fails
	speaker   time.Duration
	withdrawn time.Time
}

func (n *node) departure(watched presence) *departure {
	return &departure{
		log: slog.New(slog.DiscardHandler), watched: watched,
		ask: func(context.Context) []answer {
			now := n.answers[min(n.asked, len(n.answers)-1)]
			n.asked++
			return []answer{now, absent}
		},
		others: func() (int, error) {
			if len(n.proxies) == 0 {
				return 0, nil
			}
			now := n.proxies[0]
			n.proxies = n.proxies[1:]
			if now < 0 {
				return 0, errors.New("no /proc")
			}
			return now, nil
		},
		withdraw: func() { n.withdrawn = time.Now() },
		readers: func() int {
			if time.Since(n.withdrawn) < n.speaker {
				return 1
			}
			return 0
		},
	}
}

// TestDeparture has a proxy told to end: it waits only if it is the last one, for as long as the
// speaker takes, and removes nothing unless all says twice that it is.
func TestDeparture(t *testing.T) {
	here, gone := presence{seen: true, there: true}, presence{seen: true}
	for name, test := range map[string]struct {
		node      node
		watched   presence
		leaves    bool
		withdraws bool
		takes     time.Duration
	}{
		"restart":                   {node: node{answers: []answer{there}}, watched: here},
		"without the DaemonSet":     {node: node{answers: []answer{absent}}, watched: presence{}},
		"uninstall":                 {node{answers: []answer{refused}}, gone, true, true, 0},
		"uninstall, slow speaker":   {node{answers: []answer{absent}, speaker: 5 * time.Second}, gone, true, true, 5 * time.Second},
		"uninstall, hung speaker":   {node{answers: []answer{absent}, speaker: time.Hour}, gone, true, true, withdrawTimeout},
		"created again meanwhile":   {node{answers: []answer{absent, there}}, gone, false, true, 0},
		"API server away":           {node: node{answers: []answer{noAnswer}}, watched: gone, takes: askTimeout},
		"API server away, then up":  {node{answers: []answer{noAnswer, noAnswer, refused}}, gone, true, true, 2 * askEvery},
		"API server away later":     {node{answers: []answer{absent, noAnswer}}, gone, false, true, askTimeout},
		"API server away a moment":  {node{answers: []answer{absent, noAnswer, absent}}, gone, true, true, askEvery},
		"a role is taken away":      {node: node{answers: []answer{refused}}, watched: here, takes: askTimeout},
		"beside another Landfall":   {node: node{answers: []answer{absent}, proxies: []int{1}}, watched: gone},
		"another Landfall starts":   {node{answers: []answer{absent}, proxies: []int{0, 1}}, gone, false, true, 0},
		"cannot look for others":    {node: node{answers: []answer{absent}, proxies: []int{-1}}, watched: gone},
		"cannot look again":         {node{answers: []answer{absent}, proxies: []int{0, -1}}, gone, false, true, 0},
		"orphaned between the two":  {node{answers: []answer{deleting, orphaning}}, gone, false, true, 0},
		"deleted, then role denied": {node{answers: []answer{absent, refused}}, gone, true, true, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			leaves := test.node.departure(test.watched).leaves(t.Context())
			if withdraws := !test.node.withdrawn.IsZero(); leaves != test.leaves || withdraws != test.withdraws {
				t.Errorf("%s: leaves %v, withdraws %v", name, leaves, withdraws)
			}
			// It looks at the speaker every askEvery.
			if took := time.Since(began); took < test.takes || took > test.takes+askEvery {
				t.Errorf("%s: took %v, want %v", name, took, test.takes)
			}
		})
	}
}

// TestTheWatchShowsTheDeletionLate has the API server refuse before the watch shows why.
func TestTheWatchShowsTheDeletionLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := node{answers: []answer{refused}}
		d := n.departure(presence{})
		d.show(lb.DaemonSet{Stays: true}, true)
		time.AfterFunc(askTimeout/2, func() { d.show(lb.DaemonSet{}, false) })
		if !d.leaves(t.Context()) {
			t.Error("the rules stay")
		}
	})
}

// TestLive has the actors run on while the proxy finds out whether it is the last one, and one fail.
func TestLive(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			var ended time.Duration
			began := time.Now()
			left, err := live(ctx, func(ctx context.Context) bool {
				if !pause(ctx, time.Second) {
					t.Error("asks without the actors")
				}
				return leaves
			}, []func(context.Context) error{func(ctx context.Context) error {
				<-ctx.Done()
				ended = time.Since(began)
				return nil
			}})
			if left != leaves || err != nil || ended != 2*time.Second {
				t.Errorf("left %v, %v; the actors ended after %v", left, err, ended)
			}
		})
	}
	broken := errors.New("broken")
	fails := func(context.Context) error { return broken }
	if left, err := live(t.Context(), func(context.Context) bool { return true },
		[]func(context.Context) error{fails}); left || !errors.Is(err, broken) {
		t.Errorf("an actor fails: %v, %v", left, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if left, err := live(ctx, func(context.Context) bool { return true }, []func(context.Context) error{
		func(ctx context.Context) error { <-ctx.Done(); return broken }}); left || !errors.Is(err, broken) {
		t.Errorf("an actor fails at the end: %v, %v", left, err)
	}
}

func TestRemoveAll(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	locked := errors.New("another program holds the lock")
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		if err := removeAll(t.Context(), log, func(context.Context) error {
			if calls++; calls < 3 {
				return locked
			}
			return nil
		}); err != nil || calls != 3 {
			t.Errorf("%v after %d attempts", err, calls)
		}
		began := time.Now()
		err := removeAll(t.Context(), log, func(context.Context) error { return locked })
		if took := time.Since(began); !errors.Is(err, locked) || took != removeTimeout {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// TestAPodHasTheTime compares what an end takes at most with what the chart gives the pods.
func TestAPodHasTheTime(t *testing.T) {
	text, err := os.ReadFile("../charts/landfall/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var values struct {
		Node struct {
			TerminationGracePeriodSeconds int `json:"terminationGracePeriodSeconds"`
		} `json:"node"`
	}
	if err := yaml.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	most := 2*askTimeout + withdrawTimeout + removeTimeout
	if grace := time.Duration(values.Node.TerminationGracePeriodSeconds) * time.Second; most >= grace {
		t.Errorf("an end takes up to %v, and a pod has %v", most, grace)
	}
}

// TestOtherProxies counts the proxies in one network namespace, and in another one none of them.
func TestOtherProxies(t *testing.T) {
	ns := nstest.New(t)
	count := func(m mark, want int) {
		t.Helper()
		if n, err := m.others(); n != want || err != nil {
			t.Errorf("%d others, %v; want %d", n, err, want)
		}
	}
	elsewhere, err := newMark()
	if err != nil {
		t.Fatal(err)
	}
	defer elsewhere.Close()
	ns.Do(t, func() error {
		first, err := newMark()
		if err != nil {
			return err
		}
		defer first.Close()
		count(first, 0)
		second, err := newMark()
		if err != nil {
			return err
		}
		count(first, 1)
		count(second, 1)
		second.Close()
		count(first, 0)
		// Another user takes such a name: this thread makes a socket as that user.
		unix.RawSyscall(unix.SYS_SETFSUID, 65534, 0, 0)
		made, err := newMark()
		unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0)
		if err != nil {
			return err
		}
		defer made.Close()
		count(first, 0)
		if _, err := elsewhere.others(); err == nil {
			t.Error("a proxy that is not listed itself knows the others")
		}
		return nil
	})
}
