package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"sync"
)

// connection tells the user of landfallctl watch, in place of a log, that the API server is away,
// that it is back, and which kinds the user may not read: each once, whatever the number of kinds.
type connection struct {
	to io.Writer

	mu sync.Mutex
	// away are the watches that have no answer, denied those that were refused.
	away, denied map[string]bool
}

func newConnection(to io.Writer) *connection {
	return &connection{to: to, away: map[string]bool{}, denied: map[string]bool{}}
}

// Enabled implements slog.Handler.
func (c *connection) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

// Handle implements slog.Handler. Records of watches have the attribute watch, and error if they tell
// of a failure.
func (c *connection) Handle(_ context.Context, r slog.Record) error {
	attributes := map[string]string{}
	r.Attrs(func(a slog.Attr) bool { attributes[a.Key] = a.Value.String(); return true })
	watch, why := attributes["watch"], attributes["error"]
	if watch == "" {
		return nil // of libraries
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case strings.Contains(why, "is forbidden"):
		if !c.denied[watch] {
			c.say("%s are not shown: %s%s", watch, why, grant(why))
		}
		c.denied[watch] = true
		delete(c.away, watch)
	case why != "":
		if len(c.away) == 0 {
			c.say("the API server %s does not answer, so nothing is shown until it does: %s", attributes["server"],
				cause(why))
		}
		c.away[watch] = true
	case r.Level == slog.LevelInfo:
		waited := c.away[watch]
		delete(c.away, watch)
		if waited && len(c.away) == 0 {
			c.say("the API server answers again")
		}
		if c.denied[watch] {
			c.say("%s are shown", watch)
		}
		delete(c.denied, watch)
	}
	return nil
}

func (c *connection) say(format string, args ...any) {
	fmt.Fprintf(c.to, format+"\n", args...)
}

// cause leaves out the request that has failed, which the message quotes.
func cause(message string) string {
	if i := strings.LastIndex(message, `": `); i >= 0 {
		return message[i+len(`": `):]
	}
	return message
}

// refusal is how the API server names what a user may not do.
var refusal = regexp.MustCompile(`resource "([^"]+)" in API group "([^"]*)"`)

// grant names the rule that allows a watch.
func grant(message string) string {
	found := refusal.FindStringSubmatch(message)
	if found == nil {
		return ""
	}
	return fmt.Sprintf(`; this rule allows it: {apiGroups: [%q], resources: [%q], verbs: ["list", "watch"]}`, found[2],
		found[1])
}

// WithAttrs and WithGroup are of the interface; watches use neither.
func (c *connection) WithAttrs([]slog.Attr) slog.Handler { return c }
func (c *connection) WithGroup(string) slog.Handler      { return c }
