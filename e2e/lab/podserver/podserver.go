// Package podserver is what runs in a lab's pods: a server that says which pod it is and who it
// thinks is asking.
//
// On a TCP port it answers HTTP requests and, on a connection that does not begin with one, each
// line with a line, with or without a header of the PROXY protocol before them; on a UDP port each
// datagram with a datagram. The answer is an [Answer] in JSON, always.
package podserver

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"golang.org/x/sync/errgroup"
)

// Command is the subcommand of landfall-lab that runs the server, with a [Config] in JSON as its
// argument.
const Command = "pod"

// Missing is the one path that is answered with status 404.
const Missing = "/nonexistent"

// Config says who the pod is and where it listens.
type Config struct {
	Pod   string       `json:"pod"`
	Node  string       `json:"node"`
	Addrs []netip.Addr `json:"addrs"`
	TCP   []uint16     `json:"tcp,omitempty"`
	UDP   []uint16     `json:"udp,omitempty"`
}

// Answer is what the server says.
type Answer struct {
	Pod  string `json:"pod"`
	Node string `json:"node"`
	// Client is the source address of the request as it arrived at the pod.
	Client netip.AddrPort `json:"client"`
	// Told is the client's address as a header of the PROXY protocol (version 1) gave it, if there was
	// one.
	Told netip.AddrPort `json:"told,omitzero"`
	// Text is the line or datagram that is answered; for HTTP the path.
	Text string `json:"text,omitempty"`
}

// Run serves until ctx ends or a port cannot be listened on.
func Run(ctx context.Context, c Config) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, addr := range c.Addrs {
		for _, port := range c.TCP {
			l, err := net.Listen("tcp", netip.AddrPortFrom(addr, port).String())
			if err != nil {
				return err
			}
			context.AfterFunc(ctx, func() { l.Close() })
			g.Go(func() error { return c.serveTCP(l) })
		}
		for _, port := range c.UDP {
			conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, port)))
			if err != nil {
				return err
			}
			context.AfterFunc(ctx, func() { conn.Close() })
			g.Go(func() error { return c.serveUDP(conn) })
		}
	}
	if err := g.Wait(); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

func (c Config) serveTCP(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		go c.serveConn(conn) // ends with its peer, or with the process
	}
}

// serveConn answers on one connection until the peer closes it.
func (c Config) serveConn(conn net.Conn) {
	defer conn.Close()
	client := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	var told netip.AddrPort
	in := bufio.NewReader(conn)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		if header, ok := strings.CutPrefix(line, "PROXY "); ok && !told.IsValid() {
			if told = toldBy(header); !told.IsValid() {
				return
			}
			continue
		}
		if strings.Contains(line, " HTTP/1.") {
			c.serveHTTP(conn, bufio.NewReader(io.MultiReader(strings.NewReader(line), in)), client, told)
			return
		}
		if _, err := conn.Write(c.answer(client, told, strings.TrimSpace(line))); err != nil {
			return
		}
	}
}

// toldBy reads what follows the first word of a PROXY protocol's header: "TCP4 client server
// clientPort serverPort".
func toldBy(header string) netip.AddrPort {
	fields := strings.Fields(header)
	if len(fields) != 5 {
		return netip.AddrPort{}
	}
	told, _ := netip.ParseAddrPort(net.JoinHostPort(fields[1], fields[3]))
	return told
}

func (c Config) serveHTTP(conn net.Conn, in *bufio.Reader, client, told netip.AddrPort) {
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
		body, status := c.answer(client, told, req.URL.Path), http.StatusOK
		if req.URL.Path == Missing {
			status = http.StatusNotFound
		}
		resp := http.Response{
			StatusCode: status, ProtoMajor: 1, ProtoMinor: 1, Request: req, Close: req.Close,
			Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(bytes.NewReader(body)),
			ContentLength: int64(len(body)),
		}
		if resp.Write(conn) != nil || req.Close {
			return
		}
	}
}

func (c Config) serveUDP(conn *net.UDPConn) error {
	buf := make([]byte, 64<<10)
	for {
		n, client, err := conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		// A client that is gone is no reason to stop.
		_, _ = conn.WriteToUDPAddrPort(c.answer(client, netip.AddrPort{}, strings.TrimSpace(string(buf[:n]))), client)
	}
}

// answer returns an Answer as a line.
func (c Config) answer(client, told netip.AddrPort, text string) []byte {
	client = netip.AddrPortFrom(client.Addr().Unmap(), client.Port())
	line, err := json.Marshal(Answer{Pod: c.Pod, Node: c.Node, Client: client, Told: told, Text: text})
	if err != nil {
		return fmt.Appendf(nil, "%v\n", err)
	}
	return append(line, '\n')
}
