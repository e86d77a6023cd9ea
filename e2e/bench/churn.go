package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	churnNode = "churn"
	bareNode  = "bare"
	// burstSize is how many changes are ahead of the one that is measured.
	burstSize = 200
	// apart is the time between changes: more than the second that kube-proxy lets pass between two
	// syncs by default, so that what is measured is how long a sync takes and not how long it is put
	// off.
	apart = 1100 * time.Millisecond
)

// churn measures one contender at a number of Services: from start to the last answer, changes,
// memory and CPU.
func (b *bench) churn(ctx context.Context, c contender, services int) (row churnRow, err error) {
	row = churnRow{Proxy: c.name, Services: services}
	if err := b.flush(ctx, churnNode); err != nil {
		return row, err
	}
	from, err := newProber(b.lab.Namespace(clientPod))
	if err != nil {
		return row, err
	}
	defer from.close()
	if err := b.fleet.point(ctx, target, endpoint(b.fleet.podAddress(podA), churnNode)); err != nil {
		return row, err
	}
	p, err := b.startProxy(c, churnNode, churnNode)
	if err != nil {
		return row, err
	}
	err = p.use(ctx, func(ctx context.Context) error {
		row.Over = ofStart
		for name, address := range b.fleet.addresses {
			if _, err := from.wait(ctx, address, "", p.started.Add(limit)); err != nil {
				return fmt.Errorf("start: %s: %w", name, err)
			}
		}
		return p.account(ctx, &row, func() error { return b.measureChanges(ctx, from, &row, c.program != landfall) })
	})
	return row, unlessOver(err)
}

// unlessOver returns an error, unless it says that something took longer than the limit: the row tells of that.
func unlessOver(err error) error {
	if isOver(err) {
		progress(err.Error())
		return nil
	}
	return err
}

// isOver reports whether an error says that something took longer than the limit, and nothing else.
func isOver(err error) bool {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		return !slices.ContainsFunc(joined.Unwrap(), func(err error) bool { return !isOver(err) })
	}
	return errors.Is(err, errOverLimit)
}

// measureChanges measures how long changes take; only a few of each kind beyond quickAbove if they are slow there.
func (b *bench) measureChanges(ctx context.Context, from *prober, row *churnRow, slow bool) error {
	for _, measure := range []struct {
		name  string
		into  *quantiles
		times int
		once  func(context.Context, *prober, int) (span, error)
	}{
		{ofChange, &row.Change, b.changes, b.change},
		{ofNew, &row.New, b.newServices, b.newService},
		{ofBehind, &row.Behind, b.bursts, b.behind},
	} {
		var took []span
		row.Over = measure.name
		if row.Services > b.quickAbove && slow {
			measure.times = min(measure.times, 3)
		}
		for i := range measure.times {
			s, err := measure.once(ctx, from, i)
			if err != nil {
				return err
			}
			took = append(took, s)
			time.Sleep(apart)
		}
		*measure.into = quantilesOf(took)
	}
	return nil
}

// account notes what a program that has just started takes: until it is quiet, and then for some work.
func (p *proxy) account(ctx context.Context, row *churnRow, work func() error) (err error) {
	row.Start, row.Over = milliseconds(time.Since(p.started)), ofStartCPU
	if err := settle(ctx, p); err != nil {
		return err
	}
	if row.StartCPU, err = p.cpu(); err != nil {
		return err
	}
	if err := work(); err != nil {
		return err
	}
	row.Over = ofCPU
	if err := settle(ctx, p); err != nil {
		return err
	}
	after, err := p.cpu()
	if err != nil {
		return err
	}
	row.CPU = after - row.StartCPU
	row.Over = ""
	row.Memory, err = p.peakMemory()
	return err
}

// settle waits until the proxy has nothing left to do.
func settle(ctx context.Context, p *proxy) error {
	last, until := -1.0, time.Now().Add(limit)
	for quiet := 0; quiet < 3; {
		if time.Now().After(until) {
			return fmt.Errorf("%w: %s is still busy", errOverLimit, p.name)
		}
		now, err := p.cpu()
		if err != nil {
			return err
		}
		if quiet++; now-last > 0.02 {
			quiet = 0
		}
		last = now
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
	return nil
}

// span is how long something took from the call of the API server on.
type span struct {
	call  time.Duration // until the API server had answered
	whole time.Duration // until a client had the first right answer
}

// change moves the target to its other pod, and waits for the first answer of that pod.
func (b *bench) change(ctx context.Context, from *prober, _ int) (span, error) {
	return b.moveTarget(ctx, from, func() error { return nil })
}

// behind does so after many other changes.
func (b *bench) behind(ctx context.Context, from *prober, _ int) (span, error) {
	return b.moveTarget(ctx, from, func() error { return b.fleet.burst(ctx, min(burstSize, b.fleet.size-1)) })
}

func (b *bench) moveTarget(ctx context.Context, from *prober, first func() error) (s span, err error) {
	answer, err := from.wait(ctx, b.fleet.addresses[target], "", time.Now().Add(limit))
	if err != nil {
		return s, err
	}
	to := podA
	if answer == podA {
		to = podB
	}
	if err := first(); err != nil {
		return s, err
	}
	asked := time.Now()
	if err := b.fleet.point(ctx, target, endpoint(b.fleet.podAddress(to), churnNode)); err != nil {
		return s, err
	}
	s.call = time.Since(asked)
	_, err = from.wait(ctx, b.fleet.addresses[target], to, asked.Add(limit))
	s.whole = time.Since(asked)
	return s, err
}

// newService creates a Service whose endpoints are there, and waits for its first answer.
func (b *bench) newService(ctx context.Context, from *prober, _ int) (s span, err error) {
	name := fmt.Sprintf("new-%d", b.fleet.serial.Add(1))
	if err := b.fleet.createSlice(ctx, name, endpoint(b.fleet.podAddress(podA), churnNode)); err != nil {
		return s, err
	}
	asked := time.Now()
	address, err := b.fleet.createService(ctx, name)
	if err != nil {
		return s, err
	}
	s.call = time.Since(asked)
	_, err = from.wait(ctx, address, "", asked.Add(limit))
	s.whole = time.Since(asked)
	return s, errors.Join(err, b.fleet.remove(ctx, name))
}

func quantilesOf(took []span) (q quantiles) {
	if len(took) == 0 {
		return q
	}
	median := func(of func(span) time.Duration) time.Duration {
		slices.SortFunc(took, func(a, b span) int { return cmp.Compare(of(a), of(b)) })
		return of(took[len(took)/2])
	}
	q.Call = milliseconds(median(func(s span) time.Duration { return s.call }))
	q.P50 = milliseconds(median(func(s span) time.Duration { return s.whole }))
	q.Max = milliseconds(took[len(took)-1].whole)
	return q
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
