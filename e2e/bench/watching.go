package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// floor is a program that watches what kube-proxy watches, and does nothing with it.
const floor = "floor"

// floorAddress is where it says that it has read all, on its node.
const floorAddress = "127.0.0.1:6064"

// watchOnly measures what watching takes, while the same changes are made as for a contender: no proxy
// that watches by itself takes less.
func (b *bench) watchOnly(ctx context.Context, services int) (row churnRow, err error) {
	row = churnRow{Proxy: floor, Services: services}
	p, err := b.startProxy(contender{name: floor, program: floor}, churnNode, churnNode)
	if err != nil {
		return row, err
	}
	err = p.use(ctx, func(ctx context.Context) error {
		err := lab.WaitFor(ctx, func(string) {}, floor, limit, func(ctx context.Context) error {
			code, _, err := b.lab.Get(ctx, churnNode, "http://"+floorAddress+"/")
			if err == nil && code != http.StatusOK {
				err = fmt.Errorf("status %d", code)
			}
			return err
		})
		if err != nil {
			return err
		}
		return p.account(ctx, &row, func() error { return b.workOnly(ctx) })
	})
	return row, err
}

// workOnly makes the changes that contenders are measured with.
func (b *bench) workOnly(ctx context.Context) error {
	for _, work := range []struct {
		times int
		once  func(context.Context) error
	}{
		{b.changes, b.fleet.turnTarget},
		{b.newServices, b.fleet.comeAndGo},
		{b.bursts, func(ctx context.Context) error {
			if err := b.fleet.burst(ctx, min(burstSize, b.fleet.size-1)); err != nil {
				return err
			}
			return b.fleet.turnTarget(ctx)
		}},
	} {
		for range work.times {
			if err := work.once(ctx); err != nil {
				return err
			}
			time.Sleep(apart)
		}
	}
	return nil
}

// turnTarget gives the target its other pod.
func (f *fleet) turnTarget(ctx context.Context) error {
	pods := []string{podA, podB}
	return f.point(ctx, target, endpoint(f.podAddress(pods[f.serial.Add(1)%2]), churnNode))
}

// comeAndGo creates a Service and deletes it.
func (f *fleet) comeAndGo(ctx context.Context) error {
	name := fmt.Sprintf("new-%d", f.serial.Add(1))
	if _, err := f.create(ctx, name, endpoint(f.podAddress(podA), churnNode)); err != nil {
		return err
	}
	return f.remove(ctx, name)
}
