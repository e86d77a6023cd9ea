package ops

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/landfall-lb/landfall/internal/listen"
)

const (
	// statusConnections is how many connections to the status socket are open at a time.
	statusConnections = 4
	// statusTimeout bounds the time for one answer on the status socket.
	statusTimeout = time.Minute
)

// statusArgument is the argument that prints the status of the running program.
const statusArgument = "status"

// onlyMetrics is the value of --status-only that asks for the metrics in place of the status.
const onlyMetrics = "metrics"

// WriteStatus writes an object as JSON: the fields of head, and then a list under that name,
// element by element, so that memory does not grow with the list.
func WriteStatus[E any](w io.Writer, head any, list string, elements iter.Seq[E]) error {
	out := bufio.NewWriterSize(w, 32<<10)
	text, err := json.MarshalIndent(head, "", "  ")
	if err != nil {
		return err
	}
	_, _ = out.Write(bytes.TrimSuffix(text, []byte("\n}")))
	fmt.Fprintf(out, ",\n  %q: [", list)
	separator := "\n    "
	for element := range elements {
		text, err := json.MarshalIndent(element, "    ", "  ")
		if err != nil {
			return err
		}
		_, _ = out.WriteString(separator)
		if _, err := out.Write(text); err != nil {
			return err // the client has gone
		}
		separator = ",\n    "
	}
	if separator[0] == ',' {
		_, _ = out.WriteString("\n  ")
	}
	_, _ = out.WriteString("]\n}\n")
	return out.Flush()
}

// Status has /v1/status answered by write, on the status socket only. only is the value of
// --status-only: "" for the whole list.
func (rt *Runtime) Status(write func(w io.Writer, only string) error) {
	rt.server.local.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = write(w, r.URL.Query().Get("only")) // the client has gone
	})
}

// runLocal serves the status, and whatever the TCP port serves, on a unix socket that only the user
// of the program can connect to, for an argument of the program. A program works without it: what fails is logged.
func (s *server) runLocal(ctx context.Context, path, argument string) {
	listener, err := listen.Unix(path, 0o600)
	if err != nil {
		s.log.Warn("the argument "+argument+" does not work: cannot open its socket", "error", err)
		return
	}
	limited := listen.Limit(listener, listen.NewRoom[net.Conn](statusConnections))
	if err := s.serve(ctx, limited, s.local, statusTimeout); err != nil {
		s.log.Warn("the argument "+argument+" does not work any more", "error", err)
	}
}

// printStatus prints what a running program answers on its status socket.
func printStatus(ctx context.Context, path, only string, stdout io.Writer) error {
	at := "/v1/status?only=" + url.QueryEscape(only)
	if only == onlyMetrics {
		at = "/metrics"
	}
	return printPage(ctx, path, statusArgument, at, stdout)
}

// readyArgument is the argument by which a probe of Kubernetes asks whether the running program is ready: its port of
// metrics may be that of another process for a while.
const readyArgument = "ready"

// printReady prints whether a running program is ready. It is an error if that is not.
func printReady(ctx context.Context, path string, stdout io.Writer) error {
	return printPage(ctx, path, readyArgument, "/readyz", stdout)
}

// aliveArgument is the argument by which a probe of Kubernetes asks whether the running program hangs: its port of
// metrics may be full of others' connections.
const aliveArgument = "alive"

// printAlive prints whether the loops of a running program make progress. It is an error if one does not.
func printAlive(ctx context.Context, path string, stdout io.Writer) error {
	if path == "" {
		return Usagef("%s needs --probe-socket", aliveArgument)
	}
	return printPage(ctx, path, aliveArgument, "/healthz", stdout)
}

// printPage prints a page of a local socket.
func printPage(ctx context.Context, path, argument, page string, stdout io.Writer) error {
	client := &http.Client{Timeout: statusTimeout, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://status"+page, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	switch {
	case errors.Is(err, os.ErrNotExist) && argument == aliveArgument:
		return fmt.Errorf("%s: no program serves %s", argument, path)
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%s: no program serves %s; --status-socket names another", argument, path)
	case err != nil:
		return fmt.Errorf("%s: %w", argument, errors.Unwrap(err))
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		if argument != statusArgument {
			text, _ := io.ReadAll(io.LimitReader(response.Body, 4<<10))
			return fmt.Errorf("%s: %s", argument, bytes.TrimSpace(text))
		}
		return fmt.Errorf("%s: the program answers %s: it has just started", argument, response.Status)
	}
	if _, err := io.Copy(stdout, response.Body); err != nil {
		return fmt.Errorf("%s: %w", argument, err)
	}
	return nil
}

// Waiting adds to what a program waits for its trouble with the API server, if any: that is most likely why it
// waits.
func Waiting(what, trouble string) string {
	if what == "" || trouble == "" {
		return what
	}
	return what + ": " + trouble
}
