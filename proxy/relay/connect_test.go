package relay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// What fails on the node itself is tried elsewhere, and does not count against the backend. Neither does
// that a backend had no time to answer when another did.
func TestWhatCountsAgainstBackends(t *testing.T) {
	backends := []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80"),
		netip.MustParseAddrPort("10.0.0.3:80")}
	type answer struct {
		after time.Duration
		err   error
	}
	const never = time.Hour
	failure := func(errno error) error { return fmt.Errorf("connect: %w", errno) }
	tests := map[string]struct {
		answers    []answer
		failed     []netip.AddrPort
		failedHere int
		err        error
	}{
		"all is well":         {answers: []answer{{}}},
		"refused":             {answers: []answer{{err: failure(unix.ECONNREFUSED)}, {}}, failed: backends[:1]},
		"no route":            {answers: []answer{{err: failure(unix.EHOSTUNREACH)}, {}}, failed: backends[:1]},
		"silent":              {answers: []answer{{after: never}, {}}, failed: backends[:1]},
		"the late one wins":   {answers: []answer{{after: 260 * time.Millisecond}, {after: never}}},
		"two silent":          {answers: []answer{{after: never}, {after: never}, {}}, failed: backends[:2]},
		"nobody, in the time": {answers: []answer{{after: never}}, failed: backends[:1], err: noAnswer(10 * time.Second)},
	}
	for _, errno := range []unix.Errno{unix.EADDRNOTAVAIL, unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM,
		unix.EAGAIN} {
		tests[fmt.Sprint("here: ", errno)] = struct {
			answers    []answer
			failed     []netip.AddrPort
			failedHere int
			err        error
		}{answers: []answer{{err: failure(errno)}, {}}, failedHere: 1}
	}
	for name, test := range tests {
		synctest.Test(t, func(t *testing.T) {
			d := dialer{tries: 3, tryAfter: 250 * time.Millisecond, timeout: 10 * time.Second,
				dial: func(ctx context.Context, b netip.AddrPort) (*Conn, error) {
					a := test.answers[slices.Index(backends, b)]
					select {
					case <-ctx.Done():
						return nil, context.Cause(ctx)
					case <-time.After(a.after):
						return &Conn{}, a.err
					}
				}}
			var failed []netip.AddrPort
			c, err := d.connect(t.Context(), func(tried []netip.AddrPort) (netip.AddrPort, bool) {
				if len(tried) == len(test.answers) {
					return netip.AddrPort{}, false
				}
				return backends[len(tried)], true
			}, func(b netip.AddrPort) { failed = append(failed, b) })
			slices.SortFunc(failed, netip.AddrPort.Compare)
			if !slices.Equal(failed, test.failed) || c.failedHere != test.failedHere || !errors.Is(err, test.err) ||
				(err == nil) != (c.conn != nil) {
				t.Errorf("%s: %v count as failed, %d failed here, %v", name, failed, c.failedHere, err)
			}
			synctest.Wait()
		})
	}
}
