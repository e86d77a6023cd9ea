package main

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// proberHere is a prober in this network namespace.
func proberHere(t *testing.T) *prober {
	p := &prober{jobs: make(chan func())}
	t.Cleanup(p.close)
	go func() {
		for job := range p.jobs {
			job()
		}
	}()
	return p
}

// A proxy that ends by itself is a failure, with what it said: it is neither late nor quiet.
func TestADeadProxyIsNotLate(t *testing.T) {
	from, silent := proberHere(t), netip.MustParseAddrPort("127.0.0.1:1")
	for name, work := range map[string]func(context.Context, *proxy) error{
		"over the limit": func(ctx context.Context, p *proxy) error {
			<-p.done
			return overLimit(t.Context(), errors.New("no answer"))
		},
		"waited for": func(ctx context.Context, _ *proxy) error {
			_, err := from.wait(ctx, silent, "", time.Now().Add(limit))
			return err
		},
		"until it is quiet": func(ctx context.Context, p *proxy) error {
			<-p.done
			return settle(ctx, p)
		},
		"done": func(_ context.Context, p *proxy) error {
			<-p.done
			return nil
		},
	} {
		p, err := launch(contender{name: "dead"}, []string{"sh", "-c", "echo no such mode; exit 3"})
		if err != nil {
			t.Fatal(err)
		}
		err = unlessOver(p.use(t.Context(), func(ctx context.Context) error { return work(ctx, p) }))
		if err == nil || !strings.Contains(err.Error(), "dead ended by itself: exit status 3; it said: no such mode") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A proxy that runs is ended when its work is done, and may be late.
func TestALateProxyIsEnded(t *testing.T) {
	p, err := launch(contender{name: "late"}, []string{"sleep", "1d"})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.use(t.Context(), func(ctx context.Context) error {
		return overLimit(ctx, errors.New("no answer"))
	}); !isOver(err) {
		t.Error(err)
	}
	if err := p.cmd.Process.Signal(unix.Signal(0)); err == nil {
		t.Error("it runs on")
	}
}

// What is measured before the proxy is quiet is not over the limit: the row names the rest apart.
func TestWhatIsOver(t *testing.T) {
	p, err := launch(contender{name: "quiet"}, []string{"sleep", "1d"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.stop()
	row := churnRow{Over: ofStart}
	ctx, cancel := context.WithCancel(t.Context())
	if err := p.account(ctx, &row, func() error {
		row.Over = ofBehind
		cancel()
		return nil
	}); err == nil || row.Over != ofCPU {
		t.Errorf("after the changes %q is over, %v", row.Over, err)
	}
	if err := p.account(ctx, &row, nil); err == nil || row.Over != ofStartCPU {
		t.Errorf("after the start %q is over, %v", row.Over, err)
	}
}

// What a program has started ends with it.
func TestInGroup(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", "sleep 300 & echo started; wait")
	inGroup(cmd)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, len("started\n"))); err != nil {
		t.Fatal(err)
	}
	cancel()
	began := time.Now()
	if _, err := io.Copy(io.Discard, out); err != nil { // until all have closed their end
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil || time.Since(began) > 2*time.Minute {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}
