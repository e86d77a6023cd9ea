package health

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// HAProxy takes weights from the agent with its dynamic algorithms. With a static one it ignores all but 0 and 100 %,
// so a node with several pods that has left and is back gets no connections, as docs/guide/behind-a-load-balancer.md
// says.
func TestAgentOfHAProxy(t *testing.T) {
	program, err := exec.LookPath("haproxy")
	if err != nil {
		t.Skip("haproxy is not installed")
	}
	b := newBench(t)
	b.set(state(3))
	dynamic := map[string]bool{"roundrobin": true, "leastconn": true, "random": true, "source consistent": true,
		"static-rr": false, "source": false}
	folder := t.TempDir()
	config, control := filepath.Join(folder, "cfg"), filepath.Join(folder, "sock")
	var text strings.Builder
	fmt.Fprintf(&text, `global
    stats socket %s
defaults
    mode tcp
    timeout connect 1s
    timeout client 1s
    timeout server 1s
    default-server weight 1 agent-check agent-inter 50ms agent-port 32000
    default-server agent-send "GET /haproxy-agent HTTP/1.0\r\n\r\n"
frontend all
    bind 127.0.0.1:8080
    default_backend roundrobin
`, control)
	for name := range dynamic {
		balance, hashed := strings.CutSuffix(name, " consistent")
		fmt.Fprintf(&text, "backend %s\n    balance %s\n", strings.ReplaceAll(name, " ", "-"), balance)
		if hashed {
			text.WriteString("    hash-type consistent\n")
		}
		text.WriteString("    server node 127.0.0.1:8081\n")
	}
	if err := os.WriteFile(config, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	cmd := exec.Command(program, "-db", "-f", config)
	cmd.Stdout, cmd.Stderr = &said, &said
	b.ns.Do(t, cmd.Start)
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("haproxy: %s", &said)
		}
	}()
	// weights returns those that HAProxy has, and what it should have with a dynamic and with a static algorithm.
	weights := func(withDynamic, withStatic int) (got, want map[string]string) {
		got, want = map[string]string{}, map[string]string{}
		for name, is := range dynamic {
			n := withStatic
			if is {
				n = withDynamic
			}
			want[name] = fmt.Sprintf("%d (initial 1)", n)
			if conn, err := net.Dial("unix", control); err == nil {
				fmt.Fprintf(conn, "get weight %s/node\n", strings.ReplaceAll(name, " ", "-"))
				answer, _ := io.ReadAll(conn)
				got[name] = strings.TrimSpace(string(answer))
				conn.Close()
			}
		}
		return got, want
	}
	leaving := state(3)
	leaving.Leaving = lb.ReasonNodeLeaving
	for _, step := range []struct {
		name                    string
		state                   State
		withDynamic, withStatic int
	}{
		{"three pods", state(3), 3, 1},
		{"the node leaves", leaving, 0, 0},
		{"it is back with one pod", state(1), 1, 1},
		{"it leaves again", leaving, 0, 0},
		{"it is back with three", state(3), 3, 0},
	} {
		b.set(step.state)
		inARow := 0 // what HAProxy ignores, it ignores each time
		for deadline := time.Now().Add(time.Minute); inARow < 20; time.Sleep(50 * time.Millisecond) {
			got, want := weights(step.withDynamic, step.withStatic)
			d := cmp.Diff(want, got)
			if inARow++; d != "" {
				inARow = 0
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s (-want +got):\n%s", step.name, d)
			}
		}
	}
}
