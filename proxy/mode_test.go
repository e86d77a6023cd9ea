package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What --mode=auto takes, by the families that each mode can serve.
func TestChoose(t *testing.T) {
	errNone := errors.New("not on this node")
	open := func(mode string, families int) func() (kernel, error) {
		return func() (kernel, error) {
			k := kernel{mode: mode, families: allFamilies[:families], unusable: map[lb.Family]error{}}
			for _, family := range allFamilies[families:] {
				k.unusable[family] = errNone
			}
			if families == 0 {
				return k, errNone
			}
			return k, nil
		}
	}
	for _, test := range []struct {
		name               string
		nftables, iptables int
		want               string
	}{
		{"both can", 2, 2, modeNftables},
		{"no iptables", 2, 0, modeNftables},
		{"no nftables", 0, 2, modeIptables},
		{"no nftables, and one family", 0, 1, modeIptables},
		{"nftables for one family only", 1, 2, modeIptables},
		{"a node with one family", 1, 1, modeNftables},
		{"one family and no iptables", 1, 0, modeNftables},
		{"neither", 0, 0, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			k, why, err := choose(open(modeNftables, test.nftables), open(modeIptables, test.iptables))
			if test.want == "" {
				if !errors.Is(err, errNone) {
					t.Errorf("%v instead of what is missing", err)
				}
				return
			}
			if err != nil || k.mode != test.want || why == "" {
				t.Errorf("%s because %q, %v; want %s", k.mode, why, err, test.want)
			}
		})
	}
}

// While a trial transaction takes long, the log says what the proxy waits for. One that does not leaves no line.
func TestStartSaysThatItWaitsForTheKernel(t *testing.T) {
	errRefused := errors.New("refused")
	for _, test := range []struct {
		name string
		take time.Duration
		want []string
	}{
		{"at once", 0, nil},
		{"in time", patience - 1, nil},
		{"long", 90 * time.Second, []string{
			"5s: still waiting for the kernel to try the rules; it may be loading modules",
			"1m30s: the kernel has tried the rules"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var said []string
				started := time.Now()
				log := slog.New(lines(func(r slog.Record) {
					mu.Lock()
					defer mu.Unlock()
					said = append(said, fmt.Sprintf("%s: %s", time.Since(started), r.Message))
				}))
				err := try(log, "the rules", lb.IPv4, func() error {
					time.Sleep(test.take)
					return errRefused
				})
				mu.Lock()
				defer mu.Unlock()
				if !errors.Is(err, errRefused) || !slices.Equal(said, test.want) {
					t.Errorf("said %q, want %q: %v", said, test.want, err)
				}
			})
		})
	}
}

// lines passes on each record of a log.
type lines func(slog.Record)

func (l lines) Enabled(context.Context, slog.Level) bool      { return true }
func (l lines) Handle(_ context.Context, r slog.Record) error { l(r); return nil }
func (l lines) WithAttrs([]slog.Attr) slog.Handler            { return l }
func (l lines) WithGroup(string) slog.Handler                 { return l }

// The proxy finds out once what the kernel supports, so an error that may be gone a second later decides nothing. One
// that says that something is missing does at once.
func TestATrialIsRepeatedAfterAShortage(t *testing.T) {
	for _, test := range []struct {
		name  string
		errs  []error // of each trial; after them there is none
		asked int
		want  error
	}{
		{"none", nil, 1, nil},
		{"the kernel lacks an expression", []error{unix.ENOENT, nil}, 1, unix.ENOENT},
		{"no memory, twice", []error{fmt.Errorf("add rule: %w", unix.ENOMEM), unix.ENOBUFS}, 3, nil},
		{"no memory, and then an expression is missing", []error{unix.ENOMEM, unix.ENOENT}, 2, unix.ENOENT},
		{"no memory at all", slices.Repeat([]error{unix.ENOMEM}, 2*trials), trials, unix.ENOMEM},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				asked := 0
				err := try(slog.New(slog.DiscardHandler), "the rules", lb.IPv4, func() error {
					asked++
					if asked > len(test.errs) {
						return nil
					}
					return test.errs[asked-1]
				})
				if !errors.Is(err, test.want) || asked != test.asked {
					t.Errorf("%v after %d trials, want %v after %d", err, asked, test.want, test.asked)
				}
			})
		})
	}
}
