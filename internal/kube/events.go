package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// eventQueue is how many Events wait for the API server. The recorder drops more of them: an Event
// is a courtesy, and sending it must not block. Namespaces share the queue fairly.
const eventQueue = 1000

// maxEventMessage is how many bytes of a message are sent. With "(combined from similar events): ", which the
// correlator puts before some, these are the 1,024 characters that the chart's policy takes of a node.
const maxEventMessage = 990

// Waits between attempts to send an Event while the API server cannot be reached.
const (
	minEventRetry = 500 * time.Millisecond
	maxEventRetry = 30 * time.Second
	eventTimeout  = 10 * time.Second // of one attempt
)

// Reference names the object that an Event is about.
type Reference struct {
	APIVersion, Kind string
	Namespace, Name  string // no namespace: cluster-scoped
	UID              string
}

// ServiceReference refers to a Service.
func ServiceReference(s lb.Service) Reference {
	return Reference{APIVersion: "v1", Kind: "Service", Namespace: s.Key.Namespace, Name: s.Key.Name, UID: s.UID}
}

// PoolReference refers to an IPAddressPool.
func PoolReference(p lb.Pool) Reference {
	return Reference{APIVersion: v1beta1.GroupVersion.String(), Kind: "IPAddressPool", Name: p.Name, UID: p.UID}
}

// NodeReference refers to a Node as the kubelet does in its Events, by which kubectl finds them.
func NodeReference(name string) Reference {
	return Reference{APIVersion: "v1", Kind: "Node", Name: name, UID: name}
}

// PeerReference refers to a BGPPeer.
func PeerReference(p lb.Peer) Reference {
	return Reference{APIVersion: v1beta1.GroupVersion.String(), Kind: "BGPPeer", Name: p.Name, UID: p.UID}
}

// remembered is of how many objects, and of how many of their Events, it is known what was sent last: 0.5 to 1.5 MiB.
// client-go's own 4,096 of each grow to 5 MiB while Services come and go, which a soak of an hour takes for a leak.
const remembered = 1024

// unsent is an Event that waits to be sent, or to be sent again as the API server has not answered.
type unsent struct {
	event      *corev1.Event
	correlated *record.EventCorrelateResult // nil before its first turn
}

// Events sends Events. Repetitions become a count on the first one, and an object that would get
// too many gets them at a low rate (record.EventCorrelator).
type Events struct {
	core       kinds
	log        *slog.Logger
	source     corev1.EventSource
	queue      *fairQueue[*unsent] // by namespace; cluster-scoped objects have one of their own
	correlator *record.EventCorrelator
	sequence   atomic.Uint32 // tells Events of one moment apart in their names
	pulse      loop.Pulse
}

var _ actor.Runner = (*Events)(nil)

// Events returns a sender that names component, such as landfall-speaker, as its source, and
// instance (a node's or pod's name) as the source's host. Nothing is sent before Run is called;
// what comes before is kept.
func (c *Client) Events(component, instance string) *Events {
	return newEvents(c.events, c.log, component, instance)
}

func newEvents(core kinds, log *slog.Logger, component, instance string) *Events {
	return &Events{
		core:   core,
		log:    log,
		source: corev1.EventSource{Component: component, Host: instance},
		queue:  newFairQueue[*unsent](eventQueue),
		correlator: record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{
			LRUCacheSize: remembered, Clock: clock.RealClock{}}),
	}
}

// Normal reports something good about an object. It never blocks.
func (e *Events) Normal(about Reference, reason lb.Reason, message string) {
	e.enqueue(about, corev1.EventTypeNormal, reason, message)
}

// Warning reports something that somebody may want to change. It never blocks.
func (e *Events) Warning(about Reference, reason lb.Reason, message string) {
	e.enqueue(about, corev1.EventTypeWarning, reason, message)
}

func (e *Events) enqueue(about Reference, eventType string, reason lb.Reason, message string) {
	event := &unsent{event: e.event(about, eventType, reason, message, time.Now())}
	from, lost := e.queue.add(about.Namespace, event)
	if lost {
		e.log.Debug("the queue of Events is full: dropping one of the namespace with most", "namespace", from)
	}
}

func (e *Events) event(
	about Reference, eventType string, reason lb.Reason, message string, now time.Time) *corev1.Event {
	namespace := about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
			Name: fmt.Sprintf("%s.%x.%x", about.Name, now.UnixNano(), e.sequence.Add(1))},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: about.APIVersion, Kind: about.Kind, Namespace: about.Namespace, Name: about.Name,
			UID: types.UID(about.UID),
		},
		Type: eventType, Reason: string(reason), Message: lb.Shortened(message, maxEventMessage),
		Count: 1, FirstTimestamp: metav1.NewTime(now), LastTimestamp: metav1.NewTime(now),
		Source: e.source, ReportingController: e.source.Component, ReportingInstance: e.source.Host,
	}
}

// Busy returns for how long the actor has been at one thing.
func (e *Events) Busy() time.Duration { return e.pulse.Busy() }

// Run sends Events until ctx ends. One that gets no answer waits for the next turn of its namespace, so that an
// admission webhook which keeps those of one namespace keeps no others.
func (e *Events) Run(ctx context.Context) error {
	backoff := loop.Backoff{Min: minEventRetry, Max: maxEventRetry}
	for {
		event, ok := e.queue.next(ctx)
		if !ok {
			return nil
		}
		if !e.correlate(event) {
			continue
		}
		end, began, namespace := e.pulse.Begin(), time.Now(), event.event.InvolvedObject.Namespace
		answered := e.send(ctx, event.correlated)
		end()
		if !answered {
			e.queue.putBack(namespace, event) // before later ones: a count would go back
		}
		e.queue.took(namespace, time.Since(began))
		if answered {
			backoff.Reset()
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(backoff.Next()):
		}
	}
}

// correlate finds the Event of which this one is a repetition, once, and reports whether to send it.
func (e *Events) correlate(u *unsent) bool {
	if u.correlated != nil {
		return true
	}
	result, err := e.correlator.EventCorrelate(u.event)
	if err != nil || result.Skip {
		e.log.Debug("not sending an Event: too many like it", "about", u.event.InvolvedObject.Name, "reason", u.event.Reason,
			"error", err)
		return false
	}
	u.correlated = result
	return true
}

// send reports whether the API server has answered: an answer that says no is final.
func (e *Events) send(ctx context.Context, r *record.EventCorrelateResult) (answered bool) {
	sent, err := e.write(ctx, r)
	var answer apierrors.APIStatus
	switch {
	case err == nil:
		e.correlator.UpdateState(sent)
		return true
	case errors.As(err, &answer):
		e.log.Debug("the API server refuses an Event", "about", r.Event.InvolvedObject.Name, "reason", r.Event.Reason,
			"error", err)
		return true
	}
	return false
}

// write counts up the Event of which this one is a repetition, or creates it.
func (e *Events) write(ctx context.Context, r *record.EventCorrelateResult) (*corev1.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	events := e.core.Events(r.Event.Namespace)
	if r.Event.Count > 1 {
		sent, err := events.Patch(ctx, r.Event.Name, types.StrategicMergePatchType, r.Patch, metav1.PatchOptions{})
		if !apierrors.IsNotFound(err) {
			return sent, err
		}
		r.Event.ResourceVersion = "" // the first one has expired
	}
	return events.Create(ctx, r.Event, metav1.CreateOptions{})
}
