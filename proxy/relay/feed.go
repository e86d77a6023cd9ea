package relay

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// maxMessage is how many bytes a line of the proxy has at most: twice what the largest Service needs, of 16,384
// frontends as they are wanted and as many as they were before.
const maxMessage = 16 << 20

// follow hears the proxy and says that the relay is there, until ctx ends. What the proxy has said stays
// while it is away.
func (r *Relay) follow(ctx context.Context) error {
	var failures loop.Failures
	return loop.Retry(ctx, loop.Backoff{Min: reconnectEvery, Max: time.Second}, func(ctx context.Context) bool {
		began := r.deps.Now()
		err := r.talk(ctx)
		if ctx.Err() == nil {
			failures.Log(r.deps.Log, "not connected to the proxy: connections go straight to endpoints; trying again", "", err)
		}
		return r.deps.Now().Sub(began) > time.Second
	})
}

const reconnectEvery = 100 * time.Millisecond

// talk talks to the proxy over one connection.
func (r *Relay) talk(ctx context.Context) error {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", r.options.Socket)
	if err != nil {
		return err
	}
	return r.converse(ctx, conn)
}

// converse talks to the proxy until one of the two ends, or ctx does. It closes the connection.
func (r *Relay) converse(ctx context.Context, conn net.Conn) error {
	var hearing sync.WaitGroup
	defer hearing.Wait()
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	r.sameVersion.Store(false)
	heard := make(chan error, 1)
	hearing.Go(func() { heard <- r.hear(conn) })
	beat := time.NewTicker(wire.Beat)
	defer beat.Stop()
	encoder, leaving := json.NewEncoder(conn), r.leaving
	r.questions.again()
	for {
		if err := r.say(conn, encoder); err != nil {
			return err
		}
		select {
		case err := <-heard:
			return err
		case <-beat.C:
		case <-r.crossed:
		case <-r.questions.wake:
		case <-leaving:
			leaving = nil // said once at once, and with each beat
		}
	}
}

// say tells the proxy how the relay is, and asks what it wants to know.
func (r *Relay) say(conn net.Conn, encoder *json.Encoder) error {
	defer r.pulses.Begin()()
	hello := wire.Hello{Version: wire.Version, NoUDP: r.receivers.without(), Leaving: isClosed(r.leaving),
		Drain: r.options.Drain, Full: r.isFull(), Behind: r.Behind(), Connections: int(r.open.Load()),
		Flows: r.questions.next()}
	if r.sameVersion.Load() {
		hello.Ports, hello.NoPort = r.sockets.ports(), r.sockets.without()
	}
	if err := conn.SetWriteDeadline(time.Now().Add(wire.Silence)); err != nil {
		return err
	}
	if err := encoder.Encode(hello); err != nil {
		return err
	}
	if len(hello.Ports) > 0 {
		r.saidPorts()
	}
	return nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// hear takes in what the proxy says until it goes or is silent for too long.
func (r *Relay) hear(conn net.Conn) error {
	defer r.known.Store(false)
	defer r.telling.Store(false)
	var other loop.Failures
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, maxMessage)
	for {
		if err := conn.SetReadDeadline(time.Now().Add(wire.Silence)); err != nil {
			return err
		}
		if !lines.Scan() {
			break
		}
		if err := r.take(lines.Bytes(), &other); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("hear the proxy: %w", err)
	}
	return errors.New("the proxy closed the connection")
}

// take takes in a line of the proxy; other logs that it is of another release.
func (r *Relay) take(line []byte, other *loop.Failures) error {
	defer r.pulses.Begin()()
	m, err := decodeMessage(line)
	if err != nil {
		return err
	}
	if m.Left {
		r.leftOnce.Do(func() { close(r.left) })
	}
	if m.Version != wire.Version { // it may mean something else
		other.Log(r.deps.Log, "the proxy is of another release: connections go straight to endpoints", "",
			fmt.Errorf("its messages have version %d, and the relay's %d", m.Version, wire.Version))
		return nil
	}
	if r.table.take(m) {
		r.known.Store(true)
	}
	r.telling.Store(m.More) // after known, as takeOver goes on once neither is set
	r.questions.take(m.Answers)
	if !r.sameVersion.Swap(true) {
		r.cross() // has the ports said
	}
	return nil
}

// decodeMessage reads a line of the proxy.
func decodeMessage(line []byte) (m wire.Message, err error) {
	if err := json.Unmarshal(line, &m); err != nil {
		return m, fmt.Errorf("read a message of the proxy: %w", err)
	}
	for _, s := range m.Services {
		if s.Relayed == nil {
			continue
		}
		for _, p := range s.Relayed.Ports {
			for _, f := range p.Frontends {
				if !f.Addr.IsValid() {
					return m, fmt.Errorf("read a message of the proxy: service %s has a frontend without an address", s.Key)
				}
			}
			for _, b := range append(p.Cluster[:len(p.Cluster):len(p.Cluster)], p.Local...) {
				if !b.Addr.IsValid() {
					return m, fmt.Errorf("read a message of the proxy: service %s has a backend without an address", s.Key)
				}
			}
		}
	}
	return m, nil
}
