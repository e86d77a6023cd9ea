package e2e

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

var programs = []string{"landfall-controller", "landfall-speaker", "landfall-proxy", "landfallctl"}

// programFolder returns the folder with the programs, which are built if need be.
func programFolder(t testing.TB) string {
	t.Helper()
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := lab.Programs(t.Context(), repository, func(line string) { t.Log(line) })
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Whatever a person gets wrong at the start ends with one clear line and a non-zero status, never
// with a stack trace.
func TestBadStartsAreOneClearLine(t *testing.T) {
	t.Parallel()
	dir := programFolder(t)
	broken := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(broken, []byte("no: {config"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range programs {
		if name == "landfallctl" {
			continue // it has other flags: see ctl
		}
		for _, test := range []struct {
			what string
			args []string
			code int
			want string
		}{
			{"unknown flag", []string{"--no-such-flag"}, 2, "unknown flag: --no-such-flag"},
			{"bad level", []string{"--log-level=loud"}, 2, `--log-level: "loud" is none of`},
			{"bad address", []string{"--metrics-bind-address=nowhere"}, 2, `"nowhere" is not address:port`},
			{"no kubeconfig", []string{"--metrics-bind-address=0", "--kubeconfig=/nonexistent"}, 1,
				"/nonexistent: no such file"},
			{"broken kubeconfig", []string{"--metrics-bind-address=0", "--kubeconfig=" + broken}, 1, broken},
		} {
			t.Run(name+"/"+test.what, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				var stderr bytes.Buffer
				cmd := exec.CommandContext(ctx, filepath.Join(dir, name), test.args...)
				cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
				cmd.Stderr = &stderr
				_ = cmd.Run()
				if got := cmd.ProcessState.ExitCode(); got != test.code {
					t.Errorf("exit status %d, want %d", got, test.code)
				}
				if lines := strings.Split(strings.TrimSpace(stderr.String()), "\n"); len(lines) != 1 ||
					!strings.Contains(lines[0], test.want) {
					t.Errorf("it said %q, want one line with %q", stderr.String(), test.want)
				}
			})
		}
	}
}

// Without an API server the agents say what they wait for and go on trying; SIGTERM ends them
// cleanly.
func TestWithoutAPIServerAgentsWait(t *testing.T) {
	t.Parallel()
	dir := programFolder(t)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	content := `{"apiVersion":"v1","kind":"Config","current-context":"c",
"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],
"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:9"}}],"users":[{"name":"u","user":{}}]}`
	if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"landfall-controller": nil,
		"landfall-speaker":    {"--gate=none", "--bind-address=127.0.0.1", "--bind-port=17947", "--status-socket="},
		"landfall-proxy": {"--healthz-bind-address=127.0.0.1:0", "--status-socket=",
			"--feed-socket=" + filepath.Join(t.TempDir(), "feed.sock")},
	} {
		t.Run(name, func(t *testing.T) {
			stderr, err := os.CreateTemp(t.TempDir(), "")
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), filepath.Join(dir, name),
				append(args, "--kubeconfig="+kubeconfig, "--metrics-bind-address=0")...)
			cmd.Stderr = stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			eventually(t, "it says what it waits for", func() error {
				said, err := os.ReadFile(stderr.Name())
				if err == nil && !strings.Contains(string(said), "waiting for the API server") {
					err = context.DeadlineExceeded
				}
				return err
			})
			select {
			case err := <-ended:
				t.Fatalf("it gave up: %v", err)
			default:
			}
			_ = cmd.Process.Signal(os.Interrupt)
			select {
			case err := <-ended:
				if err != nil {
					t.Errorf("after the signal: %v", err)
				}
			case <-time.After(patience):
				t.Errorf("it does not end")
				_ = cmd.Process.Kill()
			}
			if said, _ := os.ReadFile(stderr.Name()); strings.Contains(string(said), "goroutine ") {
				t.Errorf("a stack trace:\n%s", said)
			}
		})
	}
	t.Run("landfallctl", func(t *testing.T) {
		out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "landfallctl"), "status",
			"--kubeconfig="+kubeconfig).CombinedOutput()
		if err == nil || !strings.HasPrefix(string(out), "landfallctl: the API server http://127.0.0.1:9 does not answer: ") ||
			strings.Count(string(out), "\n") != 1 {
			t.Errorf("%v: %s", err, out)
		}
	})
}
