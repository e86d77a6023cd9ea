package ops

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/pflag"
)

type result struct {
	code           int
	stdout, stderr string
}

func runProgram(p Program, env map[string]string, args ...string) result {
	var stdout, stderr bytes.Buffer
	code := p.main(args, func(name string) (string, bool) { v, ok := env[name]; return v, ok }, &stdout, &stderr)
	return result{code, stdout.String(), stderr.String()}
}

func TestFlagsAndEnvironment(t *testing.T) {
	for _, test := range []struct {
		name       string
		env        map[string]string
		args       []string
		node, hold string
	}{
		{name: "defaults", env: map[string]string{"NODE_NAME": "n1"}, node: "n1", hold: "30s"},
		{name: "environment", env: map[string]string{"NODE_NAME": "n1", "LANDFALL_NODE_NAME": "n2", "LANDFALL_HOLD": "5s"},
			node: "n2", hold: "5s"},
		{name: "flags win", env: map[string]string{"LANDFALL_NODE_NAME": "n2"},
			args: []string{"--node-name=n3", "--hold", "1m"}, node: "n3", hold: "1m"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var node, hold string
			p := Program{Name: "prog", Flags: func(f *pflag.FlagSet) { f.StringVar(&hold, "hold", "30s", "") },
				Run: func(_ context.Context, rt *Runtime) error { node = rt.NodeName; return nil }}
			if got := runProgram(p, test.env, test.args...); got.code != 0 {
				t.Fatalf("exit %d: %s", got.code, got.stderr)
			}
			if node != test.node || hold != test.hold {
				t.Errorf("node %q, hold %q; want %q, %q", node, hold, test.node, test.hold)
			}
		})
	}
}

func TestMistakesAreOneClearLine(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, test := range []struct {
		name string
		env  map[string]string
		args []string
		code int
		want string
	}{
		{name: "unknown flag", args: []string{"--nope"}, code: 2, want: "unknown flag: --nope"},
		{name: "bad value", args: []string{"--count=many"}, code: 2, want: `"many"`},
		{name: "bad environment", env: map[string]string{"LANDFALL_COUNT": "many"}, code: 2,
			want: "environment variable LANDFALL_COUNT"},
		{name: "bad level", args: []string{"--log-level=loud"}, code: 2,
			want: `--log-level: "loud" is none of debug, info, warn, error`},
		{name: "bad format", args: []string{"--log-format=xml"}, code: 2, want: `--log-format: "xml" is neither text nor json`},
		{name: "profiles for everybody", args: []string{"--pprof-address=:6060"}, code: 2,
			want: `--pprof-address: ":6060" is not a loopback address and a port`},
		{name: "profiles for the LAN", args: []string{"--pprof-address=192.0.2.1:6060"}, code: 2, want: "is not a loopback"},
		{name: "profiles without a port", args: []string{"--pprof-address=127.0.0.1"}, code: 2, want: "is not a loopback"},
		{name: "profiles where somebody listens", args: []string{"--pprof-address=" + taken.Addr().String()}, code: 1,
			want: "--pprof-address: listen tcp"},
		{name: "bad address", args: []string{"--metrics-bind-address=7480"}, code: 2, want: `"7480" is not address:port`},
		{name: "address in use", args: []string{"--metrics-bind-address=" + taken.Addr().String()}, code: 1,
			want: "address already in use"},
		{name: "failure", code: 1, want: "prog: it broke"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var count int
			p := Program{Name: "prog", Flags: func(f *pflag.FlagSet) { f.IntVar(&count, "count", 1, "") },
				Run: func(context.Context, *Runtime) error { return errors.New("it broke") }}
			got := runProgram(p, test.env, test.args...)
			if got.code != test.code || !strings.Contains(got.stderr, test.want) || strings.Count(got.stderr, "\n") != 1 {
				t.Errorf("exit %d, stderr %q; want %d, one line with %q", got.code, got.stderr, test.code, test.want)
			}
		})
	}
}

func TestHelpAndVersion(t *testing.T) {
	p := Program{Name: "prog", Summary: "does things.",
		Run: func(context.Context, *Runtime) error { return errors.New("must not run") }}
	if got := runProgram(p, nil, "--help"); got.code != 0 || !strings.Contains(got.stdout, "--kubeconfig") ||
		!strings.Contains(got.stdout, "does things.") {
		t.Errorf("--help: %+v", got)
	}
	if got := runProgram(p, nil, "--version"); got.code != 0 || !strings.HasPrefix(got.stdout, "prog ") {
		t.Errorf("--version: %+v", got)
	}
}

func TestLogsAreTextOrJSON(t *testing.T) {
	for format, want := range map[string]string{"text": `msg=hello pool=lan`, "json": `"msg":"hello","pool":"lan"}`} {
		p := Program{Name: "prog", Run: func(_ context.Context, rt *Runtime) error {
			rt.Log.Info("hello", "pool", "lan")
			return nil
		}}
		if got := runProgram(p, nil, "--log-format="+format); got.code != 0 || !strings.Contains(got.stderr, want) {
			t.Errorf("%s: %+v, want %q", format, got, want)
		}
	}
}

func TestProfiles(t *testing.T) {
	address := ownAddress()
	for path, want := range map[string]int{"/debug/pprof/": 200, "/debug/pprof/heap": 200,
		"/debug/pprof/profile?seconds=1": 200, "/debug/pprof/cmdline": 404, "/healthz": 404, "/metrics": 404} {
		p := Program{Name: "prog", Run: func(context.Context, *Runtime) error {
			code, body, err := get(client("127.0.0.1"), "http://"+address+path, "")
			if err != nil || code != want {
				t.Errorf("%s: %d %q, %v; want %d", path, code, body, err, want)
			}
			return nil
		}}
		if got := runProgram(p, nil, "--pprof-address="+address); got.code != 0 {
			t.Errorf("%s: %+v", path, got)
		}
	}
}

func TestServesUntilTheSignalAndEndsCleanly(t *testing.T) {
	address := ownAddress()

	get := func(path string) (int, string) {
		resp, err := http.Get("http://" + address + path)
		if err != nil {
			t.Errorf("GET %s: %v", path, err)
			return 0, ""
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body)
	}
	notReady := errors.New("still waiting")
	p := Program{Name: "prog", Run: func(ctx context.Context, rt *Runtime) error {
		if code, body := get("/readyz"); code != 503 || body != "starting\n" {
			t.Errorf("/readyz before there is a check: %d %q", code, body)
		}
		rt.Ready("rules", func() error { return notReady })
		if code, body := get("/readyz"); code != 503 || body != "rules: still waiting\n" {
			t.Errorf("/readyz: %d %q", code, body)
		}
		notReady = nil
		if code, _ := get("/readyz"); code != 200 {
			t.Errorf("/readyz: %d", code)
		}
		if code, body := get("/metrics"); code != 200 || !strings.Contains(body, "landfall_build_info{") {
			t.Errorf("/metrics: %d %q", code, body)
		}
		syscall.Kill(syscall.Getpid(), syscall.SIGTERM)
		<-ctx.Done()
		if code, _ := get("/healthz"); code != 200 {
			t.Errorf("/healthz after the signal: %d", code)
		}
		return nil
	}}
	if got := runProgram(p, nil, "--metrics-bind-address="+address); got.code != 0 || got.stderr != "" {
		t.Errorf("%+v", got)
	}
}

func TestWaiting(t *testing.T) {
	for _, test := range []struct{ what, refusal, want string }{
		{"", "x is forbidden", ""}, {"the Nodes", "", "the Nodes"}, {"the Nodes", "x is forbidden", "the Nodes: x is forbidden"},
	} {
		if got := Waiting(test.what, test.refusal); got != test.want {
			t.Errorf("%q and %q: %q, want %q", test.what, test.refusal, got, test.want)
		}
	}
}
