package bgp

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// agentVariable makes the test binary an agent: a process with an actor that does as it reads on
// its standard input.
const agentVariable = "LANDFALL_TEST_BGP_AGENT"

// listenVariable is where it listens.
const listenVariable = "LANDFALL_TEST_BGP_LISTEN"

func TestMain(m *testing.M) {
	if os.Getenv(agentVariable) != "" {
		runAgent()
		return
	}
	os.Exit(m.Run())
}

// runAgent reads what is desired, one line each, and writes the statuses in return, until its input
// ends.
func runAgent() {
	changed := make(chan struct{}, 1)
	a := New(Options{
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Hostname: "node-1", Changed: func() { poke(changed) },
		Listen: os.Getenv(listenVariable),
	})
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() { a.Run(ctx) })
	group.Go(func() {
		for out := json.NewEncoder(os.Stdout); ; {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			case <-time.After(50 * time.Millisecond):
			}
			out.Encode(a.Statuses())
		}
	})
	for in := json.NewDecoder(os.Stdin); ; {
		var desired map[string]plan.BGPSession
		if err := in.Decode(&desired); err != nil {
			break
		}
		a.Set(desired)
	}
	cancel()
	group.Wait()
}

// agent is an actor in a process of its own, which lives in a network namespace as a speaker does
// on its node.
type agent struct {
	cmd *exec.Cmd
	in  io.WriteCloser

	mu       sync.Mutex
	statuses map[string]Status
}

func startAgent(t testing.TB, ns *nstest.NS) *agent { return startListeningAgent(t, ns, "") }

func startListeningAgent(t testing.TB, ns *nstest.NS, listen string) *agent {
	a := &agent{cmd: exec.Command("nsenter", "--net=/run/netns/"+ns.Name, "--", os.Args[0])}
	a.cmd.Env = append(os.Environ(), agentVariable+"=1", listenVariable+"="+listen)
	a.cmd.Stderr = t.Output()
	in, errIn := a.cmd.StdinPipe()
	out, errOut := a.cmd.StdoutPipe()
	if errIn != nil || errOut != nil {
		t.Fatal(errIn, errOut)
	}
	a.in = in
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var statuses map[string]Status
			if json.Unmarshal(lines.Bytes(), &statuses) == nil {
				a.mu.Lock()
				a.statuses = statuses
				a.mu.Unlock()
			}
		}
	}()
	t.Cleanup(a.kill)
	return a
}

func (a *agent) Set(desired map[string]plan.BGPSession) { json.NewEncoder(a.in).Encode(desired) }

func (a *agent) Statuses() map[string]Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.statuses
}

// kill ends the agent as a crash does.
func (a *agent) kill() {
	a.cmd.Process.Kill()
	a.cmd.Wait()
}
