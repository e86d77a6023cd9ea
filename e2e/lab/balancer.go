package lab

import (
	"bufio"
	"context"
	"encoding/csv"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// Balancer is HAProxy on a host, as a cloud or a data centre has a load balancer in front of a
// cluster. See [Lab.StartBalancer].
type Balancer struct {
	lab     *Lab
	process *process
	socket  string
}

// Target is one server of a balancer's backend.
type Target struct {
	// Up is whether the balancer sends new connections there.
	Up bool
	// Weight is its share of them.
	Weight int
}

const balancerLog = "haproxy"

// StartBalancer starts HAProxy on a host with a configuration, which needs no way to ask it: that is
// added. HAProxy is installed if it is not there.
func (l *Lab) StartBalancer(ctx context.Context, host, config string) (*Balancer, error) {
	if err := ensurePrograms(ctx, balancerPackages, l.progress); err != nil {
		return nil, err
	}
	b := &Balancer{lab: l, socket: l.state.path("haproxy.sock")}
	ours, given := l.state.path("haproxy-lab.cfg"), l.state.path("haproxy.cfg")
	err := writeFiles(map[string][]byte{
		ours:  fmt.Appendf(nil, "global\n    stats socket %s\n", b.socket),
		given: []byte(config),
	})
	if err != nil {
		return nil, err
	}
	b.process, err = l.startProcess(balancerLog,
		command{Host: host, Argv: []string{"haproxy", "-db", "-f", ours, "-f", given}})
	if err != nil {
		return nil, err
	}
	return b, WaitFor(ctx, l.progress, "HAProxy", 10*time.Second, func(ctx context.Context) error {
		if !b.process.running() {
			return permanent{fmt.Errorf("HAProxy has ended: %w\n%s", b.process.err, tail(l.logPath(balancerLog), 12))}
		}
		_, err := b.Targets(ctx, "")
		return err
	})
}

// Targets returns the servers of a backend by their names.
func (b *Balancer) Targets(ctx context.Context, backend string) (map[string]Target, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", b.socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(requestTimeout)); err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte("show stat\n")); err != nil {
		return nil, err
	}
	rows, err := csv.NewReader(bufio.NewReader(conn)).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("show stat: %w", err)
	}
	column := map[string]int{}
	targets := map[string]Target{}
	for i, row := range rows {
		if i == 0 {
			for at, name := range row {
				column[name] = at
			}
			continue
		}
		name := row[column["svname"]]
		if row[column["# pxname"]] != backend || name == "FRONTEND" || name == "BACKEND" {
			continue
		}
		weight, err := strconv.Atoi(row[column["weight"]])
		if err != nil {
			return nil, fmt.Errorf("show stat: weight of %s: %w", name, err)
		}
		status := row[column["status"]]
		targets[name] = Target{Up: strings.HasPrefix(status, "UP") || status == "no check", Weight: weight}
	}
	return targets, nil
}

// Stop ends HAProxy, and its connections with it.
func (b *Balancer) Stop() error {
	if !b.process.running() {
		return fmt.Errorf("HAProxy has ended by itself: %w", b.process.err)
	}
	_ = b.process.stop(5 * time.Second) // it ends by the signal, without a status of its own
	return os.Remove(b.socket)
}
